"""`quantize-model`: options become a request, the request a plan, the plan files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .calibration import SOLVERS as CALIBRATING
from .calibration import Calibration, calibration_options
from .options import (
    debug_option,
    dry_run_option,
    json_option,
    output_argument,
    run_options,
    say,
    source_argument,
    stacked,
)
from .plans import carry_out

if TYPE_CHECKING:
    from tilewright.packer.engine.gate import Job
    from tilewright.packer.plan import Plan

SCHEMES = ("block-fp8", "int8", "int4", "w4afp8")  # as the registries have them; a test compares
SOLVERS = ("rtn", "mse", *CALIBRATING)
FORMS = ("native", "compressed-tensors")

what_options = stacked(
    click.option("--scheme", type=click.Choice(SCHEMES), required=True, help="Numbers that the weights get."),
    click.option("--format", "form", type=click.Choice(FORMS), help="Spelling on disk; the scheme's first by default."),
    click.option("--group-size", type=click.Choice(("32", "64", "128")), help="Group size of int4; 128 by default."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these modules as they are; repeatable."),
    click.option("--include", multiple=True, metavar="PATTERN", help="Quantize what is left alone by default."),
    click.option(
        "--experts-order",
        type=click.Choice(("gate-up", "up-gate", "interleaved")),
        help="Order of gate and up rows in stacked experts.",
    ),
    click.option("--experts-transposed", is_flag=True, help="Stacked experts are stored [in, out]."),
    click.option(
        "--mtp",
        type=click.Choice(("convert", "keep", "drop", "draft")),
        default="convert",
        show_default=True,
        help="Layers for multi-token prediction: quantize them, keep them as they are, leave them out, or make "
        "OUTPUT a draft model of that layer alone.",
    ),
    click.option(
        "--tied-head",
        type=click.Choice(("as-source", "tie")),
        help="An output head that is absent and not tied: leave it so, or declare it tied.",
    ),
    click.option("--solver", type=click.Choice(SOLVERS), help="How scales are chosen; the scheme's own by default."),
    click.option("--strict", is_flag=True, help="Refuse what would otherwise be noted."),
)


@click.command("quantize-model")
@source_argument
@output_argument
@what_options
@calibration_options
@run_options
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Who computes.")
@dry_run_option
@json_option
@debug_option
def quantize_model(source: str, output: Path, device: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Convert the checkpoint SOURCE (a directory, a .safetensors file or a hub id) and write it to OUTPUT.

    PATTERN is a dotted path, a part of one, a glob, or re:REGEX.
    """
    from tilewright.packer.checkpoint.files import open_checkpoint
    from tilewright.packer.engine.gate import Options
    from tilewright.packer.quantize.planner import plan_quantize
    from tilewright.packer.quantize.requantized import measure
    from tilewright.packer.records.journal import kept_headers

    running = Options(**{name: options.pop(name) for name in Options.__dataclass_fields__})
    calibration = Calibration.taken_from(options)
    request = _request(options)
    checkpoint = open_checkpoint(source, consumed=kept_headers(output) if running.resume else None)
    plan = plan_quantize(checkpoint, request, _device(device))
    if calibration:
        plan = calibration.planned(plan, checkpoint, output)

    def calibrate(plan: Plan, job: Job) -> Plan:
        return calibration.run(plan, checkpoint, job.plan_hash) if calibration and not job.finished else plan

    def finish() -> dict[str, Any]:
        if calibration and not dry_run:
            calibration.end()
        loss = None if dry_run or running.consume else measure(checkpoint, open_checkpoint(output))
        if loss:
            say(f"note: {loss}")
        return {"second_quantization": vars(loss) if loss else None}

    carry_out(
        {output: plan},
        checkpoint,
        running,
        dry_run=dry_run,
        as_json=as_json,
        timed=dry_run,
        before=calibrate,
        after=finish,
    )


def _request(options: dict[str, Any]) -> Any:
    from tilewright.packer.quantize.options import QuantizeOptions

    group = options.pop("group_size")
    return QuantizeOptions(group_size=int(group) if group else None, **options)


def _device(name: str) -> str:
    import torch

    from tilewright.kernels.errors import TilewrightError

    if name == "cuda" and not torch.cuda.is_available():
        raise TilewrightError(
            "--device cuda: torch finds no CUDA device", hint="leave --device out to compute on the CPU"
        )
    return name
