"""Everything that can refuse a job before a weight is read, and what the job will need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tilewright.kernels.errors import CheckpointError, PlanError
from tilewright.kernels.packed.manifest import Manifest, read_manifest
from tilewright.kernels.tensors import Reject

from ..checkpoint.files import Checkpoint
from ..folding import fold_rejects
from ..garbage import uncollected
from ..plan import Copy, Plan, kinds
from ..records.journal import JOURNAL, PARTIAL, JournalState, read_journal
from .failures import one_clear_message
from .identity import different_options, plan_hash, source_identity
from .job import Destination, Job, RunOptions, in_order
from .lock import LOCK
from .resources import disk_free, disk_needed, memory_plan, source_files
from .shards import plan_shards

CLEARING = "clearing"  # in the folder for unfinished work: what lies beside it is being removed
OLD_HEADERS = "source"  # in the same folder: what release 0.1 kept of shards that `--consume` had deleted


@uncollected()
def prepare(plans: Mapping[Path, Plan], checkpoint: Checkpoint, options: RunOptions) -> Job:
    """Check everything that can be checked before a weight is read; nothing is written.

    Args:
        plans: Output directory -> what is written there: one, or the folders of ranks in one directory.
        checkpoint: The source of all of them.
        options: How to run.

    Raises:
        PlanError: The job is refused; all reasons are in the message. A disk that is too small is no reason yet: see
            `Job.shortage`.
    """
    directories = list(plans)
    root = directories[0] if len(directories) == 1 else directories[0].parent
    assert all(path.parent == root for path in directories) or directories == [root]
    with one_clear_message(root):
        for plan in plans.values():
            _check_consistency(plan, checkpoint)
        rejects = list(dict.fromkeys(reject for plan in plans.values() for reject in plan.rejects))
        problems = _check_places(checkpoint, root, directories, options)
        if rejects or problems:
            raise _refusal(problems, rejects)
        source = source_identity(checkpoint)
        destinations = tuple(
            _destination(path, root, plan, checkpoint, options, source) for path, plan in plans.items()
        )
        if not all(one.finished for one in destinations):
            check_gone(destinations, checkpoint, _done(root, checkpoint))
        order = [shard for _, shard in in_order(destinations)]
        workers, budget, peak = memory_plan(list(plans.values()), checkpoint, options.jobs, options.memory)
        needed = disk_needed(order, checkpoint, root, options.consume) if order else 0
        free = disk_free(root)
        return Job(checkpoint, root, destinations, options, source, workers, budget, peak, needed, free)


def look_again(job: Job) -> Job:
    """The same job, looked at again by who holds the lock of its output.

    Raises:
        PlanError: The output is no longer what it was when the job was checked, or the disk is too small.
    """
    directories = [one.directory for one in job.destinations]
    if problems := _check_content(job.root, directories, job.options):
        raise _refusal(problems)
    resume = job.options.resume
    destinations = tuple(
        replace(one, finished=resume and _is_finished(one.directory, one.plan_hash, one.plan))
        for one in job.destinations
    )
    if (job.root / PARTIAL / CLEARING).exists() and not all(one.finished for one in destinations):
        destinations = tuple(replace(one, finished=False) for one in destinations)  # the rest will be cleared too
    job = replace(job, destinations=destinations)
    if not job.finished:
        check_gone(destinations, job.checkpoint, _done(job.root, job.checkpoint))
        if shortage := job.shortage:
            raise shortage
    return job


def _destination(
    path: Path,
    root: Path,
    plan: Plan,
    checkpoint: Checkpoint,
    options: RunOptions,
    source: Mapping[str, tuple[int, str, int]],
) -> Destination:
    shards = plan_shards(plan, options.max_shard_size)
    digest = plan_hash(plan, checkpoint, options.max_shard_size)
    name = "" if path == root else path.name
    return Destination(path, name, plan, shards, digest, options.resume and _is_finished(path, digest, plan))


def _refusal(problems: Sequence[str], rejects: Sequence[Reject] = ()) -> PlanError:
    """All reasons in one error: what is of one kind on one line, the way out apart."""
    lines, hint = fold_rejects(rejects)
    lines += problems
    if len(lines) == 1:
        return PlanError(lines[0], hint=hint)
    count = len(rejects) + len(problems)
    kinds = f", of {len(lines)} kinds" if count > len(lines) else ""
    return PlanError(f"{count} reasons to refuse{kinds}\n" + "\n".join(f"  {line}" for line in lines), hint=hint)


def check_gone(destinations: tuple[Destination, ...], checkpoint: Checkpoint, done: Collection[str]) -> None:
    """Source shards of which only the headers are left must not be needed any more.

    Raises:
        PlanError: Some are.
    """
    if not checkpoint.gone:
        return
    todo = [shard for one, shard in in_order(destinations) if one.path(shard.file) not in done]
    if needed := sorted(checkpoint.gone & {file for shard in todo for file in source_files(shard, checkpoint)}):
        raise PlanError(
            f"{checkpoint.root}: shards are missing and still needed: {', '.join(needed[:8])}",
            hint="restore them; a run with --consume deletes what is safe in its own output, and only there",
        )


def _done(root: Path, checkpoint: Checkpoint) -> Collection[str]:
    state = read_journal(root) if checkpoint.gone else None
    return state.finished if state else ()


def _check_consistency(plan: Plan, checkpoint: Checkpoint) -> None:
    """Errors of a planner, not of a user: nothing may disappear, overlap or come from nowhere."""
    if plan.rejects:
        return  # it need not be complete
    wrong = [f"{name}: no fate" for name in checkpoint.files.keys() - plan.fates.keys()]
    wrong += [f"{name}: a fate, but not in the source" for name in plan.fates.keys() - checkpoint.files.keys()]
    for fate, name in {id(fate): (fate, name) for name, fate in plan.fates.items()}.values():
        known = [output for output in fate.outputs if output in plan.tensors]
        if len(known) != len(fate.outputs) or bool(known) == (fate.kind == "dropped"):
            wrong.append(f"{name}: {fate.kind} feeds {fate.outputs}")
    for task, _ in kinds(plan.tasks):
        wrong += [] if task.pieces else [f"{task.sources}: a task that gives nothing"]
        if isinstance(task.step, Copy) and len(task.sources) != len(task.pieces):
            wrong.append(f"{task.sources}: copied to {task.pieces}")
    wrong += _check_extents(plan, checkpoint)
    if wrong:
        raise AssertionError(f"the plan is inconsistent ({len(wrong)}): " + "; ".join(wrong[:8]))


def _check_extents(plan: Plan, checkpoint: Checkpoint) -> list[str]:
    """What tasks read is in the source, and their pieces cover every output tensor exactly."""
    wrong: list[str] = []
    left = set(plan.tensors)
    extents: dict[str, list[tuple[int, int]]] = {}  # of tensors that are written in several pieces
    for task in plan.tasks:
        wrong += [f"{name}: not in the source" for name in task.inputs if name not in checkpoint.files]
        for name, piece in zip(task.outputs, task.first.pieces, strict=True):
            size = piece.spec.nbytes
            start = piece.offset + task.place * size
            if name in left and start == 0 and size == plan.tensors[name].nbytes:
                left.remove(name)
            elif name in plan.tensors:
                extents.setdefault(name, []).append((start, start + size))
            else:
                wrong.append(f"{name}: written, but not planned")
    for name, runs in extents.items():
        if name not in left or not _covers(runs, plan.tensors[name].nbytes):
            wrong.append(f"{name}: {plan.tensors[name].nbytes} bytes are written as {runs[:4]}")
    return wrong + [f"{name}: not written" for name in left - extents.keys()]


def _covers(runs: Iterable[tuple[int, int]], size: int) -> bool:
    end = -1
    for start, stop in sorted(runs):
        if start != max(end, 0):
            return False
        end = stop
    return end == size


def _check_places(checkpoint: Checkpoint, root: Path, directories: list[Path], options: RunOptions) -> list[str]:
    if options.resume and options.overwrite:
        return ["--resume and --overwrite exclude each other"]
    target = root.resolve()
    files = (header.path.resolve() for file, header in checkpoint.headers.items() if file not in checkpoint.gone)
    homes = sorted({checkpoint.root.resolve(), *(file.parent for file in files)})
    problems = [
        f"{root}: is, holds or lies in the source {home}; name a directory beside it"
        for home in homes
        if target.is_relative_to(home) or home.is_relative_to(target)
    ]
    if problems:
        return problems
    place = next(path for path in (target, *target.parents) if path.exists())
    if not place.is_dir():
        return [f"{root}: not a directory" if place == target else f"{root}: {place} is not a directory"]
    if options.consume and any(header.path.is_symlink() for header in checkpoint.headers.values()):
        problems.append(f"{checkpoint.root}: --consume deletes files, these are links into a cache; leave it out")
    if options.consume and (name := checkpoint.beyond_headers):
        problems.append(f"{checkpoint.root}: --consume needs a source that headers describe; `{name}` is read too")
    return problems + _check_content(root, directories, options)


def _check_content(root: Path, directories: list[Path], options: RunOptions) -> list[str]:
    """Why the output cannot be written, from what is there: nothing, a finished output, an unfinished one, or else."""
    consumed, unfinished = _left_behind(root, options)
    problems = []
    for directory in directories:
        if any((place / PARTIAL / OLD_HEADERS).exists() for place in (root, directory)):
            reason = "holds what --consume of release 0.1 has deleted from its source; only that release can go on"
            return [f"{directory}: {reason} (pip install 'tilewright<0.2', then --resume)"]
        finished = _finished(directory)
        if consumed and not options.resume and not finished:
            return [f"{root}: holds what --consume has deleted from its source; only --resume can go on"]
        if directory != root and (directory / PARTIAL).exists() and not options.overwrite:
            read_journal(directory)  # that of release 0.1, which had one for each rank, is refused
            return [f"{directory}: holds an unfinished output of a run of its own; --overwrite starts anew"]
        begun = unfinished or (directory != root and (directory / PARTIAL).exists())
        empty = not directory.exists() or not any(path.name != PARTIAL for path in directory.iterdir())
        if empty and not begun:
            continue
        if options.overwrite or options.resume:
            if not (begun or finished):
                problems.append(f"{directory}: not empty, and not written by this tool; name another or remove it")
        elif finished:
            problems.append(f"{directory}: holds a finished output; --overwrite replaces it")
        elif begun:
            problems.append(f"{root}: holds an unfinished output; --resume goes on, --overwrite starts anew")
        else:
            problems.append(f"{directory}: not empty; name another directory or remove it")
    return list(dict.fromkeys(problems))


def _left_behind(root: Path, options: RunOptions) -> tuple[bool, bool]:
    """Whether the output holds what was consumed, and whether it holds anything unfinished at all."""
    folder = root / PARTIAL
    if not folder.is_dir():
        return False, False
    unfinished = any(path.name != LOCK for path in folder.iterdir())
    try:
        state: JournalState | None = read_journal(root)
        return bool(state and state.consumed), unfinished
    except PlanError:
        if not options.overwrite:
            raise
        return b'"consumed"' in (folder / JOURNAL).read_bytes(), True


def _finished(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except CheckpointError:
        return None  # of something else, for ours are whole or not there


def _is_finished(output: Path, digest: str, plan: Plan) -> bool:
    manifest = _finished(output)
    if manifest is None:
        return False
    if manifest.plan != digest:
        hint = "name another directory, or replace it with --overwrite"
        reason = different_options(manifest.options, plan.options) or "from another source or by other rules"
        raise PlanError(f"{output}: finished already by release {manifest.tool}, but {reason}", hint=hint)
    damaged = [
        name
        for name, record in manifest.files.items()
        if not (output / name).is_file() or (output / name).stat().st_size != record.size
    ]
    if damaged:
        hint = "write it anew with --overwrite"
        raise PlanError(f"{output}: was finished, but these are not what it says: {', '.join(damaged[:8])}", hint=hint)
    return True
