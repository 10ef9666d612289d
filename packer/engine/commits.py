"""Finished files enter the journal one by one; with `--consume`, what nothing needs any more leaves the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tilewright.kernels.packed.manifest import FileRecord

from ..checkpoint.consumed import keep_header
from ..records.atomic import sync_directory
from ..records.journal import Journal
from .identity import check_unchanged
from .job import Destination, Job
from .resources import source_files
from .shards import ShardPlan


class Commits:
    """What a run has finished.

    Args:
        job: The job.
        journal: Its journal, open.
        todo: The shards that the run will write, with the directory of each.
    """

    def __init__(self, job: Job, journal: Journal, todo: Sequence[tuple[Destination, ShardPlan]]) -> None:
        self.count = 0
        self._checkpoint = job.checkpoint
        self._journal = journal
        self._consume = job.options.consume
        self._deleted: set[str] = set()
        self._waiting = Counter(file for _, shard in todo for file in source_files(shard, job.checkpoint))

    def add(self, one: Destination, shard: ShardPlan, finish: Callable[[], str]) -> None:
        """Record a file whose bytes are all written.

        Args:
            one: Its directory.
            shard: The file.
            finish: Makes it safe on disk and gives its sha256.

        Raises:
            CheckpointError: A source shard that it was made of is not what it was.
        """
        file = one.path(shard.file)
        sources = source_files(shard, self._checkpoint)
        check_unchanged(self._checkpoint, sources)
        digest = finish()
        sync_directory((self._journal.folder / file).parent)
        self._journal.record(file, FileRecord(shard.size, digest))
        for source in sources:
            self._waiting[source] -= 1
            if self._consume and self._waiting[source] == 0:
                self._delete(source)
        self.count += 1

    def close(self) -> None:
        """After the last file: delete what is left of a source that is to be consumed."""
        if self._consume:
            for file in self._checkpoint.headers:
                self._delete(file)

    def _delete(self, file: str) -> None:
        """Delete a source shard of which all that came of it, for every rank, is in the journal."""
        header = self._checkpoint.headers[file]
        if file in self._checkpoint.gone or file in self._deleted:
            return
        check_unchanged(self._checkpoint, [file], headers=True)
        keep_header(self._checkpoint.root, file, header)
        self._journal.consume(file)
        header.path.unlink()
        self._deleted.add(file)
