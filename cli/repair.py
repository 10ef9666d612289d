"""`tilewright repair`: bring a published checkpoint to what engines read, or only say what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tilewright.kernels.errors import OptionError

from .help import Command, option
from .options import (
    Choice,
    debug_option,
    duration,
    json_option,
    print_json,
    progress_for,
    run_options,
    say,
    taken,
)

WHAT = "What is looked at"
ENGINES = ("SGLang", "vLLM", "transformers", "TensorRT-LLM")  # as the packer knows them; a test compares
DAMAGED = 3


@click.command(
    "repair",
    cls=Command,
    examples=(
        ("repair org/model-fp8 --check", "will it load? say what is wrong, change nothing"),
        ("repair org/model-fp8 repaired --engine vLLM", "write one that vLLM loads"),
        ("repair org/model-fp8 repaired --original org/model", "with the digits that its scales have lost"),
    ),
)
@click.argument("source")
@click.argument("output", required=False, type=click.Path(path_type=Path))
@option("--check", is_flag=True, group=WHAT, help="Only say what is wrong, and exit with 3 if anything is.")
@option(
    "--engine",
    "engines",
    type=Choice(ENGINES),
    multiple=True,
    group=WHAT,
    help="An engine that is to load it. May be repeated.  [default: all that read its format]",
)
@option(
    "--original",
    metavar="MODEL",
    group=WHAT,
    help="The model that was quantized: scales that were rounded to 16 bits afterwards are worked out anew from it.",
)
@run_options
@json_option
@debug_option
def repair(
    source: str,
    output: Path | None,
    check: bool,
    engines: tuple[str, ...],
    original: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Write to OUTPUT the quantized checkpoint SOURCE, which others published, as serving engines read it.

    Each thing that is wrong is told with its file and the engines that stumble over it. Tensors that are right keep
    their bytes. Nothing is written where nothing is wrong.
    """
    import tilewright

    check = check or dry_run
    if output is None and not check:
        raise OptionError("OUTPUT is missing", hint="name a directory to write, or give --check")
    found = tilewright.repair(
        source,
        None if check else output,
        tilewright.RepairOptions(engines or ENGINES, original),
        run=taken(tilewright.RunOptions, options),
        progress=progress_for(as_json),
    )
    if as_json:
        print_json(found.to_json())
    else:
        for finding in found.findings:
            click.echo(str(finding))
        written = "" if found.conversion or check else "; nothing was written"
        click.echo(f"{source}: {_count(len(found.findings))}{written}")
    if found.conversion:
        say(f"done in {duration(found.conversion.seconds)}; next: tilewright repair {output} --check")
    return DAMAGED if check and found.findings else 0


def _count(findings: int) -> str:
    return "nothing is wrong" if not findings else f"{findings} thing{'s' if findings > 1 else ''} wrong"
