"""`inspect-model`: what a directory is, from its headers."""

from __future__ import annotations

import click

from .options import debug_option, json_option, print_json


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
