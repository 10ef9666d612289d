"""Fill the shards that are not finished yet: workers compute and write, one thread puts finished files on disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial

from tilewright.kernels.packed.page_guard import page_guard

from ..plan import AnyTask
from ..progress import Progress
from ..records.journal import Journal
from .commits import Commits
from .fill import run_task
from .job import Destination, Job, in_order
from .permissions import Permissions
from .resources import task_memory
from .shards import ShardPlan
from .workers import Work, Workers
from .writer import FileWriter

SYNC_AT = 64 << 20  # bytes that may wait for the disk before it is asked to take them
SYNC_PERIOD = 0.2  # seconds


def unfinished(job: Job, journal: Journal) -> list[tuple[Destination, ShardPlan]]:
    """The shards that the journal does not name, in the order in which they are written."""
    return [
        (one, shard) for one, shard in in_order(job.destinations) if one.path(shard.file) not in journal.state.finished
    ]


def begin_progress(progress: Progress, todo: list[tuple[Destination, ShardPlan]], journal: Journal) -> int:
    """Tell how many bytes there are to write, and how many there were before; gives the former."""
    size = sum(shard.size for _, shard in todo)
    before = sum(record.size for record in journal.state.finished.values())
    progress.start("writing", before + size, before)
    return size


class ShardRun:
    """One run over the shards of a job, of all its ranks, on the CPUs of this machine."""

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
        self._committed = threading.Condition()
        self._todo = unfinished(job, journal)
        self._commits = Commits(job, journal, self._todo)
        self._workers = Workers(self._works(), job.workers, job.budget)

    def run(self) -> int:
        """Write the shards that the journal does not name; returns how many bytes that were."""
        size = begin_progress(self._progress, self._todo, self._journal)
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
        self._commits.close()
        return size

    def _works(self) -> Iterator[Work]:
        for number, (one, shard) in enumerate(self._todo):
            for task in shard.tasks:
                yield task_memory(task, self._checkpoint), partial(self._run_task, number, one, shard, task)

    def _run_task(self, number: int, one: Destination, shard: ShardPlan, task: AnyTask) -> None:
        writer = self._open(number, one, shard)
        run_task(self._checkpoint, writer, shard, task, self._lost_pages)
        self._announce(one, shard, writer)

    def _open(self, number: int, one: Destination, shard: ShardPlan) -> FileWriter:
        with self._committed:  # without room for more, files are finished before the next but one is begun
            while self._consume and number - self._commits.count > 1 and not self._workers.stopped:
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
        self._commits.add(one, shard, self._writers[one.path(shard.file)].finish)
        with self._committed:
            self._committed.notify_all()
