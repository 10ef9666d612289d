"""`quantize-model`: options become a request, the request a plan, the plan files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import (
    Choice,
    calibration_options,
    calibration_taken,
    debug_option,
    dry_run_option,
    json_option,
    output_argument,
    print_conversion,
    progress_for,
    run_options,
    source_argument,
    stacked,
    taken,
)

SCHEMES = ("block-fp8", "int8", "int4", "w4afp8")  # as the registries have them; a test compares
SOLVERS = ("rtn", "mse", "gptq", "awq")
FORMS = ("native", "compressed-tensors")

what_options = stacked(
    click.option("--scheme", type=Choice(SCHEMES), required=True, help="Numbers that the weights get."),
    click.option("--format", "form", type=Choice(FORMS), help="Spelling on disk; the scheme's first by default."),
    click.option("--group-size", type=Choice(("32", "64", "128")), help="Group size of int4; 128 by default."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these modules as they are; repeatable."),
    click.option("--include", multiple=True, metavar="PATTERN", help="Quantize what is left alone by default."),
    click.option(
        "--experts-order",
        type=Choice(("gate-up", "up-gate", "interleaved")),
        help="Order of gate and up rows in stacked experts.",
    ),
    click.option("--experts-transposed", is_flag=True, help="Stacked experts are stored [in, out]."),
    click.option(
        "--mtp",
        type=Choice(("convert", "keep", "drop", "draft")),
        default="convert",
        show_default=True,
        help="Layers for multi-token prediction: quantize them, keep them as they are, leave them out, or make "
        "OUTPUT a draft model of that layer alone.",
    ),
    click.option(
        "--tied-head",
        type=Choice(("as-source", "tie")),
        help="An output head that is absent and not tied: leave it so, or declare it tied.",
    ),
    click.option("--solver", type=Choice(SOLVERS), help="How scales are chosen; the scheme's own by default."),
    click.option("--strict", is_flag=True, help="Refuse what would otherwise be noted."),
)


@click.command("quantize-model")
@source_argument
@output_argument
@what_options
@calibration_options
@run_options
@click.option("--device", type=Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Who computes.")
@dry_run_option
@json_option
@debug_option
def quantize_model(source: str, output: Path, device: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Convert the checkpoint SOURCE (a directory, a .safetensors file or a hub id) and write it to OUTPUT.

    PATTERN is a dotted path, a part of one, a glob, or re:REGEX.
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
    print_conversion(result, as_json=as_json)
