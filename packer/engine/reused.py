"""Finished shards of an earlier run are read before they are used again: a manifest states only what was seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tilewright.kernels.errors import PlanError

from ..plan import CHUNK
from ..progress import Progress
from ..records.journal import Journal
from .job import Destination, Job
from .preflight import check_gone
from .shards import ShardPlan
from .workers import Workers


def check_reused(job: Job, journal: Journal, progress: Progress) -> None:
    """Compare every shard that the journal calls finished with its size and SHA-256; others will be made again.

    Args:
        job: What is to be done.
        journal: Forgets the shards that are not what it says.
        progress: Hears how far it is.

    Raises:
        PlanError: One is damaged that cannot be made again, since its source was consumed.
    """
    found: dict[str, bool] = {}
    works = [
        (2 * CHUNK, partial(_check, journal, one, shard, found, progress.advance))
        for one in job.destinations
        for shard in one.shards
        if not one.finished and one.path(shard.file) in journal.state.finished
    ]
    if works:
        progress.start("checking what is there", sum(record.size for record in journal.state.finished.values()))
        try:
            Workers(works, job.workers, job.budget).run()
        finally:
            progress.finish()
    damaged = sorted(file for file, good in found.items() if not good)
    for file in damaged:
        del journal.state.finished[file]
    if damaged:
        try:
            check_gone(job.destinations, job.checkpoint, set(journal.state.finished))
        except PlanError as error:
            reason = f"{job.root}: finished shards were damaged since: {', '.join(damaged[:8])}; {error.message}"
            raise PlanError(reason, hint=error.hint) from None


def _check(
    journal: Journal,
    one: Destination,
    shard: ShardPlan,
    found: dict[str, bool],
    report: Callable[[int], None],
) -> None:
    file = one.path(shard.file)
    record = journal.state.finished[file]
    path = journal.folder / file
    path = path if path.exists() else one.directory / shard.file  # stopped after it got its name
    found[file] = record.size == shard.size == _size(path) and record.sha256 == _sha256(path, report)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _sha256(path: Path, report: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            report(count)
    return digest.hexdigest()
