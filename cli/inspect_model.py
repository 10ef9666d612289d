"""`inspect-model`: what a directory is, from its headers."""

from __future__ import annotations

from dataclasses import asdict

import click

from .options import debug_option, json_option, print_json


@click.command("inspect-model")
@click.argument("path")
@click.option("--excluded", is_flag=True, help="Show what engines make of the list of unquantized modules instead.")
@json_option
@debug_option
def inspect_model(path: str, excluded: bool, as_json: bool) -> None:
    """Print what PATH is: scheme, layouts, sizes, experts, and what is left in 16 bits and why.

    PATH is a directory, plain, quantized or packed, a .safetensors file or a hub id.
    """
    from tilewright.packer.inspect import inspect
    from tilewright.packer.inspect_text import describe
    from tilewright.packer.quant_config.exclusions import described, engine_views
    from tilewright.packer.sources.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
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
