"""`quantize-model`: options become a request, the request a plan, the plan files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .help import Command, option
from .options import (
    RUNNING,
    Choice,
    calibration_options,
    calibration_taken,
    debug_option,
    json_option,
    output_argument,
    print_conversion,
    progress_for,
    run_options,
    source_argument,
    stacked,
    taken,
)

SCHEMES = ("block-fp8", "int8", "int4", "mxfp4", "w4afp8")  # as the registries have them; a test compares
SOLVERS = ("rtn", "mse", "gptq", "awq", "smooth", "smooth+gptq")
ROTATIONS = ("hadamard-32", "hadamard-64", "hadamard-128")
CHECKPOINT_FORMATS = ("native", "compressed-tensors")

WHAT, WHICH, LAYOUT = (
    "What OUTPUT will be",
    "Which weights are quantized",
    "How SOURCE is laid out, where that is unclear",
)
what_options = stacked(
    option(
        "--scheme",
        type=Choice(SCHEMES),
        required=True,
        group=WHAT,
        help="Quantization scheme: 8-bit floats in blocks; 8-bit integers; 4-bit integers; 4-bit floats; 4-bit experts "
        "in an 8-bit float model.",
    ),
    option(
        "--format",
        "checkpoint_format",
        type=Choice(CHECKPOINT_FORMATS),
        group=WHAT,
        help="Checkpoint format: names and dtypes of the tensors on disk, which decide what engines can load it.  "
        "[default: native; for int4 and mxfp4 compressed-tensors]",
    ),
    option(
        "--group-size",
        type=Choice(("32", "64", "128")),
        group=WHAT,
        help="Columns of an int4 weight that share a scale.  [default: 128]",
    ),
    option(
        "--solver",
        type=Choice(SOLVERS),
        group=WHAT,
        help="How the numbers are chosen: rtn rounds to nearest; mse searches the scale with the least error; gptq, "
        "awq and smooth need --calibrate.  [default: mse for int4 and w4afp8, rtn for all else]",
    ),
    option(
        "--rotate-inputs",
        type=Choice(ROTATIONS),
        group=WHAT,
        help="For int8 and int4: multiply blocks of columns by a Hadamard matrix before rounding. Engines have to "
        "rotate activations likewise, which spreads their outliers; few do. Implies --format compressed-tensors.",
    ),
    option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        group=WHICH,
        help="Leave these modules as they are. May be repeated.",
    ),
    option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        group=WHICH,
        help="Quantize these modules although they are left as they are by default, such as lm_head. May be repeated.",
    ),
    option(
        "--mtp",
        type=Choice(("convert", "keep", "drop", "draft")),
        default="convert",
        show_default=True,
        group=WHICH,
        help="Layers for multi-token prediction: quantize them, keep them as they are, leave them out, or write only "
        "them, as a draft model for speculative decoding.",
    ),
    option(
        "--tied-head",
        type=Choice(("as-source", "tie")),
        group=WHICH,
        help="What to do if SOURCE has no output head and its config.json does not say that the embedding is one: "
        "leave config.json as it is, or write that the embedding is the head.",
    ),
    option("--strict", is_flag=True, group=WHICH, help="Refuse the job where a note would warn."),
    option(
        "--min-coverage",
        type=click.FloatRange(0, 1),
        default=0.0,
        metavar="SHARE",
        group=WHICH,
        help="Refuse the job if less than this share of the weights that could be quantized would be, such as 0.9.",
    ),
    option(
        "--experts-order",
        type=Choice(("gate-up", "up-gate", "interleaved")),
        group=LAYOUT,
        help="Order of gate and up rows where experts are stacked in one tensor.",
    ),
    option("--experts-transposed", is_flag=True, group=LAYOUT, help="Stacked experts are stored [in, out]."),
)


@click.command(
    "quantize-model",
    cls=Command,
    examples=(
        ("quantize-model org/model out --scheme block-fp8 --dry-run", "what would become of each tensor?"),
        ("quantize-model org/model out --scheme int8 --format compressed-tensors", "for vLLM"),
        ("quantize-model model out --scheme int4 --solver gptq --calibrate text.txt", "4 bits with calibration"),
    ),
)
@source_argument
@output_argument
@what_options
@calibration_options
@run_options
@option(
    "--device",
    type=Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    group=RUNNING,
    help="Device for quantization.",
)
@json_option
@debug_option
def quantize_model(source: str, output: Path, device: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Quantize the checkpoint SOURCE and write the result to the directory OUTPUT.

    SOURCE is a directory, a .safetensors file, or a Hugging Face hub id such as org/name or org/name@revision.

    PATTERN names modules: a dotted path such as model.layers.0, the end of one such as lm_head, a glob such as
    *.mlp.*, or re: and a regular expression.
    """
    import tilewright

    group = options.pop("group_size")
    run, calibration = taken(tilewright.RunOptions, options), calibration_taken(options)
    result = tilewright.quantize(
        source,
        output,
        tilewright.QuantizeOptions(group_size=int(group) if group else None, **options),
        calibration=tilewright.CalibrationOptions(**calibration) if calibration else None,
        run=run,
        device=device,
        dry_run=dry_run,
        progress=progress_for(as_json),
    )
    print_conversion(result, f"verify-accuracy {source} {output}, or pack-for-cpu {output} PACKED", as_json=as_json)
