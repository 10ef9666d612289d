"""What every command does that turns one directory into another: check the plan, say what it comes to, carry it out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import print_json, say

if TYPE_CHECKING:
    from tilewright.packer.engine.gate import Options
    from tilewright.packer.plan import Plan
    from tilewright.packer.sources.checkpoint import Checkpoint


def carry_out(
    plans: dict[Path, Plan], checkpoint: Checkpoint, running: Options, *, dry_run: bool, as_json: bool
) -> None:
    """Check every plan before the first is carried out, carry them out, and report on stdout.

    Args:
        plans: Output directory -> plan.
        checkpoint: The source of all of them.
        running: How to run.
        dry_run: Report what would be done, and stop.
        as_json: Report as one JSON document: of the plan, or a list if there are several.
    """
    from tilewright.packer.engine.gate import prepare
    from tilewright.packer.engine.pipeline import execute
    from tilewright.packer.engine.progress import Silent, progress_on
    from tilewright.packer.summary import summarize

    for note in dict.fromkeys((*checkpoint.notes, *(note for plan in plans.values() for note in plan.notes))):
        say(f"note: {note}")
    summaries = {
        output: summarize(plan, checkpoint, prepare(plan, checkpoint, output, running))
        for output, plan in plans.items()
    }
    if not dry_run:
        for output, plan in plans.items():
            execute(plan, checkpoint, output, running, Silent() if as_json else progress_on())
    if as_json:
        documents: list[dict[str, Any]] = [
            summary.document() | {"output": str(output), "dry_run": dry_run} for output, summary in summaries.items()
        ]
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for output, summary in summaries.items():
        click.echo(summary.table() if dry_run else f"{output}: {summary.line()}")
