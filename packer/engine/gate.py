"""Everything that can refuse a job before a weight is read, and what the job will need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import PlanError, check_least
from tilewright.kernels.packed.manifest import MANIFEST_FILE

from ..checkpoint.files import Checkpoint
from ..plan import Copy, Plan
from ..records.journal import PARTIAL, finished_files, kept_headers, plan_hash
from .failures import one_clear_message
from .resources import disk_free, disk_needed, memory_plan
from .shards import ShardPlan, plan_shards

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
    """

    jobs: int | None = None
    memory: int | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    resume: bool = False
    overwrite: bool = False
    consume: bool = False

    def __post_init__(self) -> None:
        check_least("--jobs", self.jobs, 1)
        check_least("--memory", self.memory, 1)
        check_least("--max-shard-size", self.max_shard_size, 1)


@dataclass(frozen=True)
class Job:
    """A plan that was checked, and may run.

    Attributes:
        plan: What is to be done.
        checkpoint: The source.
        output: The directory that is written.
        options: How it runs.
        shards: The output files with weights.
        plan_hash: sha256 of the plan.
        finished: Whether the output already is what this job would write.
        workers: Tasks at the same time.
        budget: Bytes that they may need together.
        peak_memory: Bytes that the process needs at most by estimate.
        disk_needed: Bytes still to be written.
        disk_free: Bytes that the output's file system has for them.
    """

    plan: Plan
    checkpoint: Checkpoint
    output: Path
    options: RunOptions
    shards: tuple[ShardPlan, ...]
    plan_hash: str
    finished: bool
    workers: int
    budget: int
    peak_memory: int
    disk_needed: int
    disk_free: int


def prepare(plan: Plan, checkpoint: Checkpoint, output: Path, options: RunOptions) -> Job:
    """Check everything that can be checked before a weight is read.

    Raises:
        PlanError: The job is refused; all reasons are in the message.
    """
    with one_clear_message(output):
        return _prepare(plan, checkpoint, output, options)


def _prepare(plan: Plan, checkpoint: Checkpoint, output: Path, options: RunOptions) -> Job:
    _check_consistency(plan, checkpoint)
    problems = [str(reject) for reject in plan.rejects]
    problems += _check_places(checkpoint, output, options)
    if problems:
        raise _refusal(problems)
    shards = plan_shards(plan, options.max_shard_size)
    digest = plan_hash(plan, checkpoint, options.max_shard_size)
    finished = options.resume and _is_finished(output, digest)
    workers, budget, peak = memory_plan(plan, checkpoint, options.jobs, options.memory)
    needed, free = (0 if finished else disk_needed(shards, checkpoint, output, options.consume)), disk_free(output)
    if not finished:
        _check_room(output, needed, free, options)
        _check_gone(shards, checkpoint, output)
    return Job(plan, checkpoint, output, options, shards, digest, finished, workers, budget, peak, needed, free)


def check_again(job: Job) -> None:
    """Look at the output directory once more right before it is written: a calibration may have taken hours.

    Raises:
        PlanError: Something else was written there since the job was checked.
    """
    if problems := _check_content(job.output, job.options):
        raise _refusal(problems)


def _refusal(problems: list[str]) -> PlanError:
    if len(problems) == 1:
        return PlanError(problems[0])
    return PlanError(f"{len(problems)} reasons to refuse\n" + "\n".join(f"  {problem}" for problem in problems))


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10_000_000 else f"{size} bytes"


def _check_room(output: Path, needed: int, free: int, options: RunOptions) -> None:
    if needed > free:
        way = "free some, or name a directory on another file system"
        more = "" if options.consume else "; --consume makes room by deleting source shards that are done"
        raise PlanError(f"{output}: {_gb(needed)} are needed, {_gb(free)} are free", hint=way + more)


def _check_gone(shards: tuple[ShardPlan, ...], checkpoint: Checkpoint, output: Path) -> None:
    """Source shards of which only the headers are left must not be needed any more."""
    done = finished_files(output)
    sources = {source.name for shard in shards if shard.file not in done for t in shard.tasks for source in t.sources}
    needed = sorted(checkpoint.gone & {checkpoint.files[name] for name in sources})
    if needed:
        raise PlanError(f"{checkpoint.root}: shards are missing and still needed: {', '.join(needed)}", hint="restore")


def _check_consistency(plan: Plan, checkpoint: Checkpoint) -> None:
    """Errors of a planner, not of a user: nothing may disappear, overlap or come from nowhere."""
    if plan.rejects:
        return  # it need not be complete
    wrong = [f"{name}: no fate" for name in checkpoint.files if name not in plan.fates]
    wrong += [f"{name}: a fate, but not in the source" for name in plan.fates if name not in checkpoint.files]
    wrong += [
        f"{name}: {fate.kind} feeds {fate.outputs}"
        for name, fate in plan.fates.items()
        if not all(output in plan.tensors for output in fate.outputs) or bool(fate.outputs) == (fate.kind == "dropped")
    ]
    extents: dict[str, list[tuple[int, int]]] = {name: [] for name in plan.tensors}
    for task in plan.tasks:
        wrong += [f"{source.name}: not in the source" for source in task.sources if source.name not in checkpoint.files]
        wrong += [] if task.pieces else [f"{task.sources}: a task that gives nothing"]
        for piece in task.pieces:
            extents.setdefault(piece.name, []).append((piece.offset, piece.offset + piece.spec.nbytes))
        if isinstance(task.step, Copy) and len(task.sources) != len(task.pieces):
            wrong.append(f"{task.sources}: copied to {task.pieces}")
    for name, runs in extents.items():
        if name not in plan.tensors:
            wrong.append(f"{name}: written, but not planned")
        elif not _covers(runs, plan.tensors[name].nbytes):
            wrong.append(f"{name}: {plan.tensors[name].nbytes} bytes are written as {runs[:4]}")
    if wrong:
        raise AssertionError(f"the plan is inconsistent ({len(wrong)}): " + "; ".join(wrong[:8]))


def _covers(runs: Iterable[tuple[int, int]], size: int) -> bool:
    end = -1
    for start, stop in sorted(runs):
        if start != max(end, 0):
            return False
        end = stop
    return end == size


def _check_places(checkpoint: Checkpoint, output: Path, options: RunOptions) -> list[str]:
    if options.resume and options.overwrite:
        return ["--resume and --overwrite exclude each other"]
    target = output.resolve()
    files = (header.path.resolve() for file, header in checkpoint.headers.items() if file not in checkpoint.gone)
    homes = sorted({checkpoint.root.resolve(), *(file.parent for file in files)})
    problems = [
        f"{output}: is, holds or lies in the source {home}; name a directory beside it"
        for home in homes
        if target.is_relative_to(home) or home.is_relative_to(target)
    ]
    if problems:
        return problems
    place = next(path for path in (target, *target.parents) if path.exists())
    if not place.is_dir():
        return [f"{output}: not a directory" if place == target else f"{output}: {place} is not a directory"]
    if options.consume and any(header.path.is_symlink() for header in checkpoint.headers.values()):
        problems.append(f"{checkpoint.root}: --consume deletes files, these are links into a cache; leave it out")
    return problems + _check_content(output, options)


def _check_content(output: Path, options: RunOptions) -> list[str]:
    if not output.exists() or not any(output.iterdir()):
        return []
    if kept_headers(output).exists() and not options.resume:
        return [f"{output}: holds what --consume has deleted from its source; only --resume can go on"]
    if options.overwrite or options.resume:
        if (output / PARTIAL).exists() or read_manifest(output):
            return []
        return [f"{output}: not empty, and not written by this tool; name another directory or remove it"]
    if read_manifest(output):
        return [f"{output}: holds a finished output; --overwrite replaces it"]
    if (output / PARTIAL).exists():
        return [f"{output}: holds an unfinished output; --resume goes on, --overwrite starts anew"]
    return [f"{output}: not empty; name another directory or remove it"]


def read_manifest(output: Path) -> dict[str, Any]:
    """The manifest of a finished output, empty if there is none that this tool wrote."""
    try:
        manifest = json.loads((output / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and "tilewright" in manifest else {}


def _is_finished(output: Path, digest: str) -> bool:
    manifest = read_manifest(output)
    if not manifest:
        return False
    if manifest.get("plan") != digest:
        hint = "name another directory, or replace it with --overwrite"
        raise PlanError(f"{output}: finished already, but from another source or with other options", hint=hint)
    damaged = [
        name
        for name, record in manifest["files"].items()
        if not (output / name).is_file() or (output / name).stat().st_size != record["size"]
    ]
    if damaged:
        hint = "write it anew with --overwrite"
        raise PlanError(f"{output}: was finished, but these are not what it says: {', '.join(damaged[:8])}", hint=hint)
    return True
