"""`inspect-model`: what a directory is, from its headers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .options import debug_option, json_option, print_json, say

if TYPE_CHECKING:
    from tilewright.packer.checkpoint.files import Checkpoint


@click.command("inspect-model")
@click.argument("path")
@click.option("--excluded", is_flag=True, help="Show what engines make of the list of unquantized modules instead.")
@click.option("--checksums", is_flag=True, help="Also read all files and compare them with manifest.json.")
@json_option
@debug_option
def inspect_model(path: str, excluded: bool, checksums: bool, as_json: bool) -> None:
    """Print what PATH is: scheme, layouts, sizes, experts, and what is left in 16 bits and why.

    PATH is a directory, plain, quantized or packed, a .safetensors file or a hub id.
    """
    from tilewright.packer.checkpoint.files import open_checkpoint
    from tilewright.packer.inspect import inspect
    from tilewright.packer.inspect_text import describe
    from tilewright.packer.quant_config.exclusions import described, engine_views

    checkpoint = open_checkpoint(path)
    if checksums:
        _compare_files(checkpoint)
    if excluded:
        views = engine_views(checkpoint)
        if as_json:
            print_json([asdict(view) for view in views])
        else:
            click.echo(described(views))
        return
    found = inspect(checkpoint, path)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(describe(found))


def _compare_files(checkpoint: Checkpoint) -> None:
    from tilewright.kernels.errors import CheckpointError
    from tilewright.packer.records.manifest import check_files

    found = check_files(checkpoint.root, checkpoint.headers)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.root}: --checksums: there is no manifest.json of Tilewright to compare with",
            hint="leave --checksums out; only what Tilewright wrote has one",
        )
    if found.damaged:
        raise CheckpointError(
            f"{checkpoint.root}: {len(found.damaged)} of {found.checked} files are not what was written\n"
            + "\n".join(f"  {line}" for line in found.damaged),
            hint="fetch or convert them again",
        )
    say(f"{found.checked} files are what manifest.json says")
