"""`pack-for-cpu`: put the weights of a checkpoint into the byte order of the CPU kernels, or back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .help import Command, option
from .options import (
    Choice,
    Least,
    debug_option,
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
    "cpu-mxfp4",
    "cpu-int4-compact",
)  # as the registry has them; a test compares


WHAT, RANKS = "What OUTPUT will be", "Several processes (ranks) that share the model"


@click.command(
    "pack-for-cpu",
    cls=Command,
    examples=(
        ("pack-for-cpu quantized packed", "pack a quantized checkpoint"),
        ("pack-for-cpu quantized packed --tp 2", "for two processes, each with half of every matrix"),
        ("pack-for-cpu packed quantized --unpack", "turn it back into the checkpoint"),
    ),
)
@source_argument
@output_argument
@option(
    "--layout",
    type=Choice(LAYOUTS),
    group=WHAT,
    help="Layout to prefer for the weights that it can hold.  [default: by the number format of each weight]",
)
@option(
    "--absorbed",
    is_flag=True,
    group=WHAT,
    help="For latent attention (DeepSeek): also write kv_b_proj as the two matrices w_kc and w_vc."
    " Engines need them to attend in the latent space.",
)
@option(
    "--no-join",
    is_flag=True,
    group=WHAT,
    help="Keep q, k, v and gate, up as modules of their own instead of joining them to one.",
)
@option("--unpack", is_flag=True, group=WHAT, help="Turn the packed directory SOURCE back into a checkpoint.")
@option(
    "--tp", type=Least(1), default=1, metavar="N", group=RANKS, help="Tensor parallel: cut every matrix for N ranks."
)
@option(
    "--ep", type=Least(1), default=1, metavar="N", group=RANKS, help="Expert parallel: deal the experts to N ranks."
)
@run_options
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
    """Write the weights of the checkpoint SOURCE to the directory OUTPUT, in the order in which CPU kernels read them.

    SOURCE is a directory, 16-bit or quantized, a .safetensors file, or a Hugging Face hub id.

    Nothing is quantized here: quantized weights keep their codes, 16-bit matrices are stored in bf16. q, k and v of
    an attention are joined to one module, and so are gate and up of an MLP, where they have the same number format and
    whole blocks of rows. With --tp or --ep, OUTPUT holds a directory for each rank.
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
    print_conversion(
        result, f"verify-accuracy {source} {output}" if not unpack else f"inspect-model {output}", as_json=as_json
    )
