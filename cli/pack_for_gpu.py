"""`pack-for-gpu`: put int4 experts into the byte order of Hopper kernels, or back."""

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

LAYOUTS = ("gpu-cutlass-w4", "gpu-trtllm-w4", "gpu-hopper-w4")  # as the registry has them; a test compares


@click.command("pack-for-gpu")
@source_argument
@output_argument
@click.option(
    "--layout",
    type=Choice(LAYOUTS),
    default="gpu-hopper-w4",
    show_default=True,
    help="Byte order of the experts: of the bundled kernel, SGLang's (gate first) or TensorRT-LLM's (up first).",
)
@click.option("--ep", type=Least(1), default=1, help="Deal the experts to this many ranks.")
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
    import tilewright

    if unpack and ep > 1:
        raise tilewright.OptionError("--ep says how to pack, --unpack does the opposite")
    run, progress = taken(tilewright.RunOptions, running), progress_for(as_json)
    if unpack:
        result = tilewright.unpack(source, output, run=run, dry_run=dry_run, progress=progress)
    else:
        options = tilewright.PackOptions("gpu", layout, ep=ep)
        result = tilewright.pack(source, output, options, run=run, dry_run=dry_run, progress=progress)
    print_conversion(result, as_json=as_json)
