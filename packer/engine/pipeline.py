"""Execute a job: sources are mapped, tasks run side by side, pieces go to their places, hashes follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.kernels.errors import PlanError, SchemeError

from ..checkpoint.files import Checkpoint
from ..plan import Plan
from ..progress import Progress, Silent
from ..records.journal import JOURNAL, PARTIAL, Journal, JournalState, read_journal
from .cluster import ClusterRun
from .failures import one_clear_message
from .identity import different_options, reading
from .job import Job, RunOptions
from .lock import LOCK, OutputLock, empty_folder
from .output import clear, complete
from .permissions import Permissions
from .preflight import CLEARING, look_again, prepare
from .reused import check_reused
from .run import ShardRun


@dataclass(frozen=True)
class Result:
    """What a run did.

    Attributes:
        job: What was to be done.
        written: Bytes of weights that this run wrote; 0 if all was there already.
        notes: What was noticed on the way.
    """

    job: Job
    written: int
    notes: tuple[str, ...] = ()


def execute(
    plan: Plan,
    checkpoint: Checkpoint,
    output: Path,
    options: RunOptions | None = None,
    progress: Progress | None = None,
) -> Result:
    """Check a plan and write everything that it says into the directory `output`: `prepare`, then `run_job`."""
    return run_job(prepare({output: plan}, checkpoint, options or RunOptions()), progress)


def run_job(job: Job, progress: Progress | None = None, before: Callable[[], Sequence[str]] = tuple) -> Result:
    """Write everything that a checked job says.

    Args:
        job: From `prepare`.
        progress: Hears how far it is.
        before: What has to happen before the first task, a calibration; called with the lock held if anything is to
            be done. Gives notes for the ledger.

    Raises:
        PlanError: The output is not what it was when the job was checked, another run writes there, or the disk is too
            small; nothing was written.
        TilewrightError: It failed or was interrupted; unless a weight was the reason, `--resume` goes on from there.
    """
    with one_clear_message(job.root):
        permissions = Permissions.like(job.checkpoint)
        lock = OutputLock(job.root, permissions.folder)
        done = False
        try:
            job = look_again(job)
            result = Result(job, 0) if job.finished else _run(job, progress or Silent(), before, permissions)
            done = True
        except SchemeError:
            # The source or the options must change, so this state is of no use; unless it holds what was consumed.
            state = read_journal(job.root)
            done = not (state and state.consumed)
            raise
        finally:
            lock.release(finished=done or _left_nothing(job.root / PARTIAL))
    return result


def _left_nothing(folder: Path) -> bool:
    """Whether a run that failed has made nothing that a later one could use."""
    return {path.name for path in folder.iterdir()} <= {LOCK, JOURNAL} and not (
        (folder / JOURNAL).exists() and (folder / JOURNAL).read_bytes().count(b"\n") > 1
    )


def _run(job: Job, progress: Progress, before: Callable[[], Sequence[str]], permissions: Permissions) -> Result:
    journal = _journal(job)
    try:
        with reading(job.checkpoint):
            notes = tuple(before())
        check_reused(job, journal, progress)
        runner = ClusterRun if job.options.ray else ShardRun
        written = runner(job, journal, progress, permissions).run()
        complete(job, journal, notes, permissions)
        return Result(job, written, notes)
    finally:
        journal.close()


def _journal(job: Job) -> Journal:
    """The journal to go on with, or a new one in an output where nothing is left of an earlier run."""
    folder = job.root / PARTIAL
    if job.options.overwrite or (folder / CLEARING).exists():
        clear(job)
    plans = {one.name: one.plan_hash for one in job.destinations}
    state = read_journal(job.root) if job.options.resume else None
    if state is None:
        empty_folder(folder)
        return Journal.begin(job.root, plans, job.source, {one.name: one.plan.options for one in job.destinations})
    _check_same(job, state, plans)
    return Journal.go_on(job.root, state)


def _check_same(job: Job, state: JournalState, plans: dict[str, str]) -> None:
    hint = "restore what was there, or start anew with --overwrite"
    changed = sorted(
        file for file in state.source.keys() | job.source.keys() if state.source.get(file) != job.source.get(file)
    )
    if changed:
        raise PlanError(
            f"{job.root}: the source changed since the run that --resume would go on with: {', '.join(changed[:8])}",
            hint=hint,
        )
    if state.plans != plans:
        told = [
            different_options(state.options.get(one.name, {}), one.plan.options)
            for one in job.destinations
            if one.name in state.options
        ]
        reason = next((text for text in told if text), "with other options or rules, or another --max-shard-size")
        raise PlanError(f"{job.root}: --resume cannot go on: the run was begun {reason}", hint=hint)
