"""A job that was checked and may run: what is written where, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.kernels.errors import PlanError, check_least

from ..checkpoint.files import Checkpoint
from ..plan import Plan
from ..records.journal import Identity
from .shards import ShardPlan

MAX_SHARD_SIZE = 5_000_000_000  # bytes; what the hub's own tools write


@dataclass(frozen=True)
class RunOptions:
    """How a plan is executed; nothing but `max_shard_size` can change a byte of the output.

    Attributes:
        jobs: Tasks at the same time; None: as many as this process may use CPUs.
        memory: Bytes that the process may allocate; None: four fifths of what is available. Less means fewer tasks at
            the same time, down to one.
        max_shard_size: Bytes of data in one output file, unless a single weight is larger.
        resume: Go on with what an interrupted run left; start afresh if there is nothing.
        overwrite: Remove what an earlier run wrote first.
        consume: Delete each source shard when all that came of it is safely written and recorded.
        ray: Address of the Ray cluster that does the work ("auto": the one of this machine); None works here alone.
    """

    jobs: int | None = None
    memory: int | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    resume: bool = False
    overwrite: bool = False
    consume: bool = False
    ray: str | None = None

    def __post_init__(self) -> None:
        check_least("--jobs", self.jobs, 1)
        check_least("--memory", self.memory, 1)
        check_least("--max-shard-size", self.max_shard_size, 1)


@dataclass(frozen=True)
class Destination:
    """One output directory of a job.

    Attributes:
        directory: Where it is.
        name: The same, relative to the job's root: empty if it is the root, else the folder of a rank.
        plan: What is written there.
        shards: Its files with weights.
        plan_hash: sha256 of the plan.
        finished: Whether it already holds what this job would write.
    """

    directory: Path
    name: str
    plan: Plan
    shards: tuple[ShardPlan, ...]
    plan_hash: str
    finished: bool

    def path(self, file: str) -> str:
        """A file of this directory, relative to the job's root."""
        return f"{self.name}/{file}" if self.name else file


@dataclass(frozen=True)
class Job:
    """Plans that were checked, and may run together: one, or one for each rank.

    Attributes:
        checkpoint: The source of all of them.
        root: The directory that was asked for; it holds the lock, the journal and whatever is unfinished.
        destinations: The root itself, or the folder of each rank below it.
        options: How the job runs.
        source: What each source shard was when its header was read.
        workers: Tasks at the same time.
        budget: Bytes that they may need together.
        peak_memory: Bytes that the process needs at most by estimate.
        disk_needed: Bytes still to be written.
        disk_free: Bytes that the output's file system has for them.
    """

    checkpoint: Checkpoint
    root: Path
    destinations: tuple[Destination, ...]
    options: RunOptions
    source: Mapping[str, Identity]
    workers: int
    budget: int
    peak_memory: int
    disk_needed: int
    disk_free: int

    @property
    def finished(self) -> bool:
        """Whether there is nothing to do."""
        return all(one.finished for one in self.destinations)

    @property
    def plan_hash(self) -> str:
        """What identifies the job."""
        return ":".join(one.plan_hash for one in self.destinations)

    @property
    def shards(self) -> tuple[ShardPlan, ...]:
        """All files with weights."""
        return tuple(shard for one in self.destinations for shard in one.shards)

    @property
    def shortage(self) -> PlanError | None:
        """Why the disk is too small, or None if it is not."""
        if self.disk_needed <= self.disk_free:
            return None
        way = "free some, or name a directory on another file system"
        more = "" if self.options.consume else "; --consume makes room by deleting source shards that are done"
        reason = f"{gigabytes(self.disk_needed)} are needed, {gigabytes(self.disk_free)} are free"
        return PlanError(f"{self.root}: {reason}", hint=way + more)


def gigabytes(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 1e9:.2f} GB" if size >= 10_000_000 else f"{size} bytes"


def in_order(destinations: tuple[Destination, ...]) -> list[tuple[Destination, ShardPlan]]:
    """The shards of all unfinished destinations in the order in which they are written.

    Ranks go side by side, so that what they read of the source is read once, and can be given up early.
    """
    queue = [
        ((number + 1) / len(one.shards), rank, one, shard)
        for rank, one in enumerate(destinations)
        if not one.finished
        for number, shard in enumerate(one.shards)
    ]
    return [(one, shard) for _, _, one, shard in sorted(queue, key=lambda item: item[:2])]
