"""Execute a plan: sources are mapped, tasks run side by side, pieces go to their places, hashes follow."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.tensors import TensorSpec

from ..checkpoint.files import Checkpoint
from ..plan import Copy, Plan, Task
from ..progress import Progress, Silent
from ..records.journal import PARTIAL, FileRecord, Journal, kept_headers, source_identity
from .failures import one_clear_message
from .gate import Job, RunOptions, check_again, prepare
from .output import clear, complete
from .resources import source_files, task_memory
from .shards import ShardPlan
from .workers import Work, Workers
from .writer import FileWriter, opened, sync_directory

SYNC_AT = 64 << 20  # bytes that may wait for the disk before it is asked to take them
SYNC_PERIOD = 0.2  # seconds


@dataclass(frozen=True)
class Result:
    """What a run did.

    Attributes:
        job: What was to be done.
        written: Bytes of weights that this run wrote; 0 if all was there already.
    """

    job: Job
    written: int


def execute(
    plan: Plan,
    checkpoint: Checkpoint,
    output: Path,
    options: RunOptions | None = None,
    progress: Progress | None = None,
) -> Result:
    """Check a plan and write everything that it says into the directory `output`: `prepare`, then `run_job`."""
    return run_job(prepare(plan, checkpoint, output, options or RunOptions()), progress)


def run_job(job: Job, progress: Progress | None = None) -> Result:
    """Write everything that a checked job says.

    Raises:
        PlanError: The output is not what it was when the job was checked; nothing was written.
        TilewrightError: It failed or was interrupted; unless a weight was the reason, `--resume` goes on from there.
    """
    output, options, checkpoint = job.output, job.options, job.checkpoint
    with one_clear_message(output):
        if job.finished:
            shutil.rmtree(output / PARTIAL, ignore_errors=True)
            return Result(job, 0)
        check_again(job)
        if options.overwrite and output.exists():
            clear(output)
        existed = output.exists()
        journal = Journal(output, job.plan_hash, source_identity(checkpoint), resume=options.resume)
        try:
            if options.consume:
                _keep_headers(checkpoint, output)
            written = _Run(job, journal, progress or Silent()).run()
            complete(job, journal)
        except SchemeError:
            # The source or the options must change, so this state is of no use; unless it holds what was consumed.
            if not options.consume:
                shutil.rmtree(journal.folder)
                if not existed:
                    output.rmdir()
            raise
        finally:
            journal.close()
    return Result(job, written)


def _keep_headers(checkpoint: Checkpoint, output: Path) -> None:
    """Keep what `open_checkpoint` needs of each source shard: files of the same size with only the header in them."""
    folder = kept_headers(output)
    folder.mkdir(exist_ok=True)
    for file, header in checkpoint.headers.items():
        path = folder / file
        if path.exists():
            continue
        temporary = folder / "unfinished"
        with header.path.open("rb") as source, temporary.open("wb") as target:
            target.write(source.read(header.data_start))
            target.truncate(header.size)
        time = header.path.stat().st_mtime_ns
        os.utime(temporary, ns=(time, time))
        with opened(temporary) as fd:
            os.fsync(fd)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(path)
        sync_directory(path.parent)


class _Run:
    """The shards that are not finished yet, filled by workers and put on disk by one thread of its own."""

    def __init__(self, job: Job, journal: Journal, progress: Progress) -> None:
        self._checkpoint = checkpoint = job.checkpoint
        self._journal = journal
        self._consume = job.options.consume
        self._progress = progress
        self._todo = [shard for shard in job.shards if shard.file not in journal.finished]
        self._done_before = sum(record.size for record in journal.finished.values())
        self._waiting = Counter(file for shard in self._todo for file in source_files(shard, checkpoint))
        self._writers: dict[str, FileWriter] = {}
        self._opening = threading.Lock()
        self._complete: queue.Queue[ShardPlan | None] = queue.Queue()
        self._announced: set[str] = set()
        self._committed = threading.Condition()
        self._commits = 0
        self._workers = Workers(self._works(), job.workers, job.budget)

    def run(self) -> int:
        """Write the shards; returns how many bytes that were."""
        size = sum(shard.size for shard in self._todo)
        self._progress.start("writing", self._done_before + size, self._done_before)
        committer = threading.Thread(target=self._commit_all)
        committer.start()
        try:
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
        for number, shard in enumerate(self._todo):
            for task in shard.tasks:
                yield task_memory(task, self._checkpoint), partial(self._run_task, number, shard, task)

    def _run_task(self, number: int, shard: ShardPlan, task: Task) -> None:
        writer = self._open(number, shard)
        if isinstance(task.step, Copy):
            for source, piece in zip(task.sources, task.pieces, strict=True):
                path, start, size = self._checkpoint.extent(source)
                assert size == piece.spec.nbytes, f"{source} has {size} bytes, {piece} is planned"
                with opened(path) as fd:
                    writer.copy(shard.offsets[piece.name] + piece.offset, fd, start, size, path)
        else:
            self._compute(writer, shard, task)
        self._announce(shard, writer)

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

    def _open(self, number: int, shard: ShardPlan) -> FileWriter:
        with self._committed:  # without room for more, files are finished before the next but one is begun
            while self._consume and number - self._commits > 1 and not self._workers.stopped:
                self._committed.wait(timeout=1)
        with self._opening:
            if shard.file not in self._writers:
                path = self._journal.folder / shard.file
                self._writers[shard.file] = FileWriter(path, shard.size, self._progress.advance)
                self._writers[shard.file].write(0, shard.header)
            return self._writers[shard.file]

    def _announce(self, shard: ShardPlan, writer: FileWriter) -> None:
        """Whoever finds the file complete first hands it on; hashing may end on another thread than writing."""
        with self._opening:
            if not writer.complete or shard.file in self._announced:
                return
            self._announced.add(shard.file)
        self._complete.put(shard)

    def _commit_all(self) -> None:
        while True:
            try:
                shard = self._complete.get(timeout=SYNC_PERIOD)
                if shard is None:
                    return
                self._commit(shard)
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

    def _commit(self, shard: ShardPlan) -> None:
        writer = self._writers[shard.file]
        digest = writer.finish()
        sync_directory(self._journal.folder)
        self._journal.record(shard.file, FileRecord(shard.size, digest))
        for file in source_files(shard, self._checkpoint):
            self._waiting[file] -= 1
            if self._consume and self._waiting[file] == 0:
                self._delete_source(file)
        with self._committed:
            self._commits += 1
            self._committed.notify_all()

    def _delete_source(self, file: str) -> None:
        if file not in self._checkpoint.gone:
            self._checkpoint.headers[file].path.unlink(missing_ok=True)
