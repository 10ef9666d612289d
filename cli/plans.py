"""What every command does that turns one directory into another: check the plan, say what it comes to, carry it out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import print_json, say

if TYPE_CHECKING:
    from tilewright.packer.checkpoint.files import Checkpoint
    from tilewright.packer.engine.gate import Job, Options
    from tilewright.packer.plan import Plan


def carry_out(
    plans: dict[Path, Plan],
    checkpoint: Checkpoint,
    running: Options,
    *,
    dry_run: bool,
    as_json: bool,
    timed: bool = False,
    before: Callable[[Plan, Job], Plan] = lambda plan, job: plan,
    after: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Check every plan before the first is carried out, carry them out, and report on stdout.

    Args:
        plans: Output directory -> plan.
        checkpoint: The source of all of them.
        running: How to run.
        dry_run: Report what would be done, and stop.
        as_json: Report as one JSON document: of the plan, or a list if there are several.
        timed: Estimate how long a plan will take.
        before: What has to happen between the check of a plan and its execution; gives the plan to execute.
        after: What has to happen when all is done, also in a dry run; gives more to report in JSON.
    """
    from tilewright.packer.engine.gate import prepare
    from tilewright.packer.engine.pipeline import execute
    from tilewright.packer.engine.progress import Silent, progress_on
    from tilewright.packer.summary import summarize

    for note in dict.fromkeys((*checkpoint.notes, *(note for plan in plans.values() for note in plan.notes))):
        say(f"note: {note}")
    jobs = {output: prepare(plan, checkpoint, output, running) for output, plan in plans.items()}
    needed = max(job.peak_memory for job in jobs.values())
    if running.memory and needed > running.memory:
        say(f"note: about {needed >> 20} MiB of memory are needed at least, --memory allows {running.memory >> 20} MiB")
    summaries = {output: summarize(plans[output], checkpoint, job, timed=timed) for output, job in jobs.items()}
    if not dry_run:
        for output, plan in plans.items():
            ready = before(plan, jobs[output])
            execute(ready, checkpoint, output, running, Silent() if as_json else progress_on())
    more = after()
    if as_json:
        documents = [
            summary.document() | {"output": str(output), "dry_run": dry_run} | more
            for output, summary in summaries.items()
        ]
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for output, summary in summaries.items():
        click.echo(summary.table() if dry_run else f"{output}: {summary.line()}")
