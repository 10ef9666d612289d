"""`inspect-model`: what a directory is, from its headers."""

from __future__ import annotations

import click

from .help import Command, option
from .options import debug_option, json_option, print_json

WHAT = "What is read"


@click.command(
    "inspect-model",
    cls=Command,
    examples=(
        ("inspect-model packed", "what is it?"),
        ("inspect-model quantized --excluded", "which modules does each engine take for unquantized?"),
    ),
)
@click.argument("path")
@option(
    "--excluded",
    is_flag=True,
    group=WHAT,
    help="Print instead which modules each engine would load as unquantized, and whether the files agree.",
)
@option("--checksums", is_flag=True, group=WHAT, help="Also compare all files with the SHA-256 in manifest.json.")
@json_option
@debug_option
def inspect_model(path: str, excluded: bool, checksums: bool, as_json: bool) -> None:
    """Print what PATH holds: scheme, layouts, sizes, experts, and what is not quantized and why.

    PATH is a directory with a plain, quantized or packed model, a .safetensors file, or a Hugging Face hub id.
    """
    from tilewright.packer.inspect_text import describe
    from tilewright.packer.jobs import inspect as job
    from tilewright.packer.quant_config.exclusions import described

    if excluded:
        views = job.engine_exclusions(path, checksums=checksums)
        if as_json:
            print_json(job.views_to_json(views))
        else:
            click.echo(described(list(views)))
        return
    found = job.inspect(path, checksums=checksums)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(describe(found))
