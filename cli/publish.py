"""`tilewright publish`: bring an output to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .help import Command, option
from .options import debug_option, json_option, print_json, progress_for

CARD = "What the model card says"
WHERE = "Where it goes"


@click.command(
    "publish",
    cls=Command,
    examples=(
        ("publish quantized you/model-int8 --base-model org/model --dry-run", "list what would go, print the card"),
        (
            "publish quantized you/model-int8 --base-model org/model --verification verification.json --strict",
            "only with all figures",
        ),
    ),
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("repo", metavar="ORG/NAME")
@option("--base-model", metavar="ORG/NAME", group=CARD, help="The model that was converted.")
@option("--license", metavar="ID", group=CARD, help="License of that model, where its own card does not say it.")
@option(
    "--verification",
    type=click.Path(path_type=Path),
    metavar="FILE",
    group=CARD,
    help="What verify-accuracy --json printed about DIRECTORY; the card shows its figures.",
)
@option("--strict", is_flag=True, group=CARD, help="Refuse what was not verified, and a card that would be incomplete.")
@option("--private", is_flag=True, group=WHERE, help="Make a new repository private.")
@option("--revision", default="main", show_default=True, group=WHERE, help="Branch to publish on.")
@option("--dry-run", is_flag=True, group=WHERE, help="List what would go and print the model card; send nothing.")
@json_option
@debug_option
def publish(directory: Path, repo: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Upload DIRECTORY, which Tilewright wrote, to the repository ORG/NAME of the hub, with a model card.

    Weights go first; index, manifest and card last, so that an upload that was cut never looks complete. The same
    command goes on after an interruption. Log in by `hf auth login` or set HF_TOKEN.
    """
    import tilewright

    result = tilewright.publish(
        directory, repo, tilewright.PublishOptions(**options), dry_run=dry_run, progress=progress_for(as_json)
    )
    if as_json:
        print_json(result.to_json())
        return
    if dry_run:
        for name in result.sent:
            click.echo(f"send    {name}")
        for name in result.present:
            click.echo(f"there   {name}")
        for name in result.removed:
            click.echo(f"remove  {name}")
        for name in result.left_out:
            click.echo(f"keep    {name}")
        click.echo(f"\n{result.card}")
        return
    click.echo(f"{result.repo}: {len(result.sent)} files sent, {len(result.present)} were there: {result.url}")
