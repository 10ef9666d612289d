"""`pack-for-cpu`: put the weights of a checkpoint into the byte order of the CPU kernels, or back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import (
    Choice,
    Least,
    debug_option,
    dry_run_option,
    json_option,
    output_argument,
    print_conversion,
    progress_for,
    run_options,
    source_argument,
    taken,
)

LAYOUTS = (
    "cpu-vnni-bf16",
    "cpu-vnni-int8",
    "cpu-vnni-fp8",
    "cpu-vnni-int4",
)  # as the registry has them; a test compares


@click.command("pack-for-cpu")
@source_argument
@output_argument
@click.option("--layout", type=Choice(LAYOUTS), help="Layout to prefer for the weights that it can hold.")
@click.option("--tp", type=Least(1), default=1, help="Cut every matrix for this many ranks.")
@click.option("--ep", type=Least(1), default=1, help="Deal the experts to this many groups of ranks.")
@click.option("--absorbed", is_flag=True, help="Also split kv_b_proj of latent attention into w_kc and w_vc.")
@click.option("--no-join", is_flag=True, help="Pack q, k, v and gate, up as Linears of their own, not as one.")
@click.option(
    "--unpack", is_flag=True, help="SOURCE is a packed directory; write the checkpoint that it was made from."
)
@run_options
@dry_run_option
@json_option
@debug_option
def pack_for_cpu(
    source: str,
    output: Path,
    layout: str | None,
    tp: int,
    ep: int,
    absorbed: bool,
    no_join: bool,
    unpack: bool,
    dry_run: bool,
    as_json: bool,
    **running: Any,
) -> None:
    """Pack the checkpoint SOURCE (16-bit or quantized) for CPUs and write it to OUTPUT.

    Quantized weights keep their codes; 16-bit matrices are packed in bf16. q, k and v of an attention become one
    Linear, and so do gate and up of an MLP, where they are of one kind and of whole blocks of rows. With --tp or --ep,
    OUTPUT holds a directory for each rank.
    """
    import tilewright

    if unpack and (layout or absorbed or no_join or max(tp, ep) > 1):
        ways = "--layout, --tp, --ep, --absorbed and --no-join"
        raise tilewright.OptionError(f"{ways} say how to pack, --unpack does the opposite")
    run, progress = taken(tilewright.RunOptions, running), progress_for(as_json)
    if unpack:
        result = tilewright.unpack(source, output, run=run, dry_run=dry_run, progress=progress)
    else:
        options = tilewright.PackOptions("cpu", layout, tp, ep, absorbed, not no_join)
        result = tilewright.pack(source, output, options, run=run, dry_run=dry_run, progress=progress)
    print_conversion(result, as_json=as_json)
