"""`pack-for-cpu`: put the weights of a checkpoint into the byte order of the CPU kernels, or back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import debug_option, dry_run_option, json_option, output_argument, run_options, source_argument
from .plans import carry_out

LAYOUTS = (
    "cpu-vnni-bf16",
    "cpu-vnni-int8",
    "cpu-vnni-fp8",
    "cpu-vnni-int4",
)  # as the registry has them; a test compares


@click.command("pack-for-cpu")
@source_argument
@output_argument
@click.option("--layout", type=click.Choice(LAYOUTS), help="Layout to prefer for the weights that it can hold.")
@click.option("--tp", type=click.IntRange(1), default=1, help="Cut every matrix for this many ranks.")
@click.option("--ep", type=click.IntRange(1), default=1, help="Deal the experts to this many groups of ranks.")
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
    from tilewright.kernels.packed.module_spec import rank_directory
    from tilewright.packer.checkpoint.files import open_checkpoint
    from tilewright.packer.engine.gate import Options
    from tilewright.packer.pack.planner import plan_pack, plan_ranks
    from tilewright.packer.pack.target import CpuTarget
    from tilewright.packer.pack.unpack import plan_unpack
    from tilewright.packer.records.journal import kept_headers

    if unpack and (layout or absorbed or no_join or max(tp, ep) > 1):
        ways = "--layout, --tp, --ep, --absorbed and --no-join"
        raise click.UsageError(f"{ways} say how to pack, --unpack does the opposite")
    target = CpuTarget(layout, absorbs=absorbed, joins=not no_join)
    options = Options(**running)
    checkpoint = open_checkpoint(source, consumed=kept_headers(output) if options.resume else None)
    if unpack:
        plans = {output: plan_unpack(checkpoint)}
    elif max(tp, ep) == 1:
        plans = {output: plan_pack(checkpoint, target)}
    else:
        ranked = enumerate(plan_ranks(checkpoint, target, tp, ep))
        plans = {output / rank_directory(rank, max(tp, ep)): plan for rank, plan in ranked}
    carry_out(plans, checkpoint, options, dry_run=dry_run, as_json=as_json)
