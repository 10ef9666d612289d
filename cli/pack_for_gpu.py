"""`pack-for-gpu`: put int4 experts into the byte order of Hopper kernels, or back."""

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

LAYOUTS = ("gpu-cutlass-w4", "gpu-trtllm-w4", "gpu-hopper-w4")  # as the registry has them; a test compares


WHAT, RANKS = "What OUTPUT will be", "Several GPUs (ranks) that share the model"


@click.command(
    "pack-for-gpu",
    cls=Command,
    examples=(
        ("pack-for-gpu quantized packed", "for the bundled Hopper kernel"),
        ("pack-for-gpu quantized packed --layout gpu-cutlass-w4 --ep 8", "for SGLang, experts on 8 GPUs"),
    ),
)
@source_argument
@output_argument
@option(
    "--layout",
    type=Choice(LAYOUTS),
    default="gpu-hopper-w4",
    show_default=True,
    group=WHAT,
    help="Byte order of the experts: for the bundled kernel, for SGLang, or for TensorRT-LLM.",
)
@option("--unpack", is_flag=True, group=WHAT, help="Turn the packed directory SOURCE back into a checkpoint.")
@option(
    "--ep", type=Least(1), default=1, metavar="N", group=RANKS, help="Expert parallel: deal the experts to N ranks."
)
@run_options
@json_option
@debug_option
def pack_for_gpu(
    source: str, output: Path, layout: str, ep: int, unpack: bool, dry_run: bool, as_json: bool, **running: Any
) -> None:
    """Write the checkpoint SOURCE to the directory OUTPUT, its int4 experts in the order in which Hopper kernels read.

    SOURCE is a directory, a .safetensors file, or a Hugging Face hub id; quantize-model --scheme w4afp8 makes it.

    Codes are kept, scales are rounded to bf16 as the kernels read them, all other tensors are copied. With --ep,
    OUTPUT holds a directory for each rank. No GPU is needed.
    """
    import tilewright

    if unpack and ep > 1:
        raise tilewright.OptionError("--ep says how to pack, --unpack does the opposite")
    run, progress = taken(tilewright.RunOptions, running), progress_for(as_json)
    if unpack:
        result = tilewright.unpack(source, output, run=run, dry_run=dry_run, progress=progress)
    else:
        options = tilewright.PackOptions("gpu", layout, ep=ep)
        result = tilewright.pack(source, output, options, run=run, dry_run=dry_run, progress=progress)
    print_conversion(result, f"inspect-model {output}", as_json=as_json)
