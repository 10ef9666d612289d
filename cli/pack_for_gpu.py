"""`pack-for-gpu`: put int4 experts into the byte order of Hopper kernels, or back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import debug_option, dry_run_option, json_option, output_argument, run_options, source_argument
from .plans import carry_out

LAYOUTS = ("gpu-cutlass-w4", "gpu-trtllm-w4", "gpu-hopper-w4")  # as the registry has them; a test compares


@click.command("pack-for-gpu")
@source_argument
@output_argument
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default="gpu-hopper-w4",
    show_default=True,
    help="Byte order of the experts: of the bundled kernel, SGLang's (gate first) or TensorRT-LLM's (up first).",
)
@click.option("--ep", type=click.IntRange(1), default=1, help="Deal the experts to this many ranks.")
@click.option(
    "--unpack", is_flag=True, help="SOURCE is a packed directory; write the checkpoint that it was made from."
)
@run_options
@dry_run_option
@json_option
@debug_option
def pack_for_gpu(
    source: str, output: Path, layout: str, ep: int, unpack: bool, dry_run: bool, as_json: bool, **running: Any
) -> None:
    """Pack the int4 experts of the checkpoint SOURCE for Hopper GPUs and write it to OUTPUT.

    Codes are kept, scales are rounded to bf16 as kernels read them, and all other tensors are copied. With --ep,
    OUTPUT holds a directory for each rank. No GPU is needed.
    """
    from tilewright.kernels.packed.module_spec import rank_directory
    from tilewright.packer.checkpoint.files import open_checkpoint
    from tilewright.packer.engine.gate import Options
    from tilewright.packer.pack.planner import plan_pack, plan_ranks
    from tilewright.packer.pack.target import GpuTarget
    from tilewright.packer.pack.unpack import plan_unpack
    from tilewright.packer.records.journal import kept_headers

    if unpack and ep > 1:
        raise click.UsageError("--ep says how to pack, --unpack does the opposite")
    options = Options(**running)
    checkpoint = open_checkpoint(source, consumed=kept_headers(output) if options.resume else None)
    target = GpuTarget(layout)
    if unpack:
        plans = {output: plan_unpack(checkpoint)}
    elif ep == 1:
        plans = {output: plan_pack(checkpoint, target)}
    else:
        ranked = enumerate(plan_ranks(checkpoint, target, 1, ep))
        plans = {output / rank_directory(rank, ep): plan for rank, plan in ranked}
    carry_out(plans, checkpoint, options, dry_run=dry_run, as_json=as_json)
