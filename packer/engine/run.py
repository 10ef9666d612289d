"""Fill the shards that are not finished yet: workers compute and write, one thread puts finished files on disk."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.manifest import FileRecord
from tilewright.kernels.packed.page_guard import page_guard
from tilewright.kernels.tensors import TensorSpec

from ..checkpoint.consumed import keep_header
from ..plan import Copy, Task
from ..progress import Progress
from ..records.atomic import opened, sync_directory
from ..records.journal import Journal
from .identity import check_unchanged
from .job import Destination, Job, in_order
from .permissions import Permissions
from .resources import source_files, task_memory
from .shards import ShardPlan
from .workers import Work, Workers
from .writer import FileWriter

SYNC_AT = 64 << 20  # bytes that may wait for the disk before it is asked to take them
SYNC_PERIOD = 0.2  # seconds


class ShardRun:
    """One run over the shards of a job, of all its ranks."""

    def __init__(self, job: Job, journal: Journal, progress: Progress, permissions: Permissions) -> None:
        self._checkpoint = job.checkpoint
        self._journal = journal
        self._consume = job.options.consume
        self._progress = progress
        self._lost_pages: Callable[[], int] = lambda: 0
        self._permissions = permissions
        self._writers: dict[str, FileWriter] = {}
        self._opening = threading.Lock()
        self._complete: queue.Queue[tuple[Destination, ShardPlan] | None] = queue.Queue()
        self._announced: set[str] = set()
        self._deleted: set[str] = set()
        self._committed = threading.Condition()
        self._commits = 0
        self._todo = [
            (one, shard)
            for one, shard in in_order(job.destinations)
            if one.path(shard.file) not in journal.state.finished
        ]
        self._waiting = Counter(file for _, shard in self._todo for file in source_files(shard, self._checkpoint))
        self._workers = Workers(self._works(), job.workers, job.budget)

    def run(self) -> int:
        """Write the shards that the journal does not name; returns how many bytes that were."""
        size = sum(shard.size for _, shard in self._todo)
        before = sum(record.size for record in self._journal.state.finished.values())
        self._progress.start("writing", before + size, before)
        committer = threading.Thread(target=self._commit_all)
        committer.start()
        try:
            with page_guard() as self._lost_pages:
                self._workers.run()
        finally:
            self._complete.put(None)
            committer.join()
            self._progress.finish()
            for writer in self._writers.values():
                writer.close()
        self._workers.check()
        if self._consume:
            for file in self._checkpoint.headers:
                self._delete_source(file)
        return size

    def _works(self) -> Iterator[Work]:
        for number, (one, shard) in enumerate(self._todo):
            for task in shard.tasks:
                yield task_memory(task, self._checkpoint), partial(self._run_task, number, one, shard, task)

    def _run_task(self, number: int, one: Destination, shard: ShardPlan, task: Task) -> None:
        writer = self._open(number, one, shard)
        files = {self._checkpoint.files[source.name] for source in task.sources}
        try:
            if isinstance(task.step, Copy):
                self._copy(writer, shard, task)
            else:
                self._compute(writer, shard, task)
            if lost := self._lost_pages():
                raise CheckpointError(
                    f"{lost} pages of {', '.join(sorted(files))} could not be read",
                    hint="the disk or the network of the source fails; use --resume when it is well again",
                )
        except Exception:  # numbers that make no sense may be those of a file that is being written
            check_unchanged(self._checkpoint, files)
            raise
        self._announce(one, shard, writer)

    def _copy(self, writer: FileWriter, shard: ShardPlan, task: Task) -> None:
        for source, piece in zip(task.sources, task.pieces, strict=True):
            path, start, size = self._checkpoint.extent(source)
            assert size == piece.spec.nbytes, f"{source} has {size} bytes, {piece} is planned"
            with opened(path) as fd:
                writer.copy(shard.offsets[piece.name] + piece.offset, fd, start, size, path)

    def _compute(self, writer: FileWriter, shard: ShardPlan, task: Task) -> None:
        given = dict(task.run([self._checkpoint.tensor(source) for source in task.sources]))
        for source in task.sources:
            self._checkpoint.forget(source)
        for piece in task.pieces:
            tensor = given.pop(piece.name)
            got = TensorSpec.of(tensor)
            assert got == piece.spec, f"{piece.name}: {piece.spec} is planned, {task.step} gives {got}"
            writer.write(shard.offsets[piece.name] + piece.offset, tensor.contiguous())
        assert not given, f"{task.step} also gives {sorted(given)}, which is not planned"

    def _open(self, number: int, one: Destination, shard: ShardPlan) -> FileWriter:
        with self._committed:  # without room for more, files are finished before the next but one is begun
            while self._consume and number - self._commits > 1 and not self._workers.stopped:
                self._committed.wait(timeout=1)
        with self._opening:
            file = one.path(shard.file)
            if file not in self._writers:
                path = self._journal.folder / file
                path.parent.mkdir(self._permissions.folder, exist_ok=True)
                writer = FileWriter(path, shard.size, self._progress.advance, self._permissions.file)
                self._writers[file] = writer
                writer.write(0, shard.header)
            return self._writers[file]

    def _announce(self, one: Destination, shard: ShardPlan, writer: FileWriter) -> None:
        """Whoever finds the file complete first hands it on; hashing may end on another thread than writing."""
        with self._opening:
            file = one.path(shard.file)
            if not writer.complete or file in self._announced:
                return
            self._announced.add(file)
        self._complete.put((one, shard))

    def _commit_all(self) -> None:
        while True:
            try:
                item = self._complete.get(timeout=SYNC_PERIOD)
                if item is None:
                    return
                self._commit(*item)
            except queue.Empty:
                self._sync()
            except BaseException as error:
                self._workers.stop(error)
                return

    def _sync(self) -> None:
        with self._opening:
            writers = [w for file, w in self._writers.items() if file not in self._announced and w.unsynced > SYNC_AT]
        for writer in writers:
            writer.sync()

    def _commit(self, one: Destination, shard: ShardPlan) -> None:
        file = one.path(shard.file)
        sources = source_files(shard, self._checkpoint)
        check_unchanged(self._checkpoint, sources)
        digest = self._writers[file].finish()
        sync_directory((self._journal.folder / file).parent)
        self._journal.record(file, FileRecord(shard.size, digest))
        for source in sources:
            self._waiting[source] -= 1
            if self._consume and self._waiting[source] == 0:
                self._delete_source(source)
        with self._committed:
            self._commits += 1
            self._committed.notify_all()

    def _delete_source(self, file: str) -> None:
        """Delete a source shard of which all that came of it, for every rank, is in the journal."""
        header = self._checkpoint.headers[file]
        if file in self._checkpoint.gone or file in self._deleted:
            return
        check_unchanged(self._checkpoint, [file], headers=True)
        keep_header(self._checkpoint.root, file, header)
        self._journal.consume(file)
        header.path.unlink()
        self._deleted.add(file)
