"""Quantize a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tilewright.kernels.errors import CheckpointError, TilewrightError, check_choice

from ..checkpoint.files import open_checkpoint
from ..engine.identity import reading
from ..engine.job import RunOptions
from ..progress import Progress
from ..quantize.options import QuantizeOptions
from ..quantize.planner import plan_quantize
from ..quantize.requantized import measure
from .calibration import CalibrationOptions, split_solver
from .conversion import ConversionResult, Run

DEVICES = ("cpu", "cuda")


def quantize(
    source: str | Path,
    output: str | Path,
    options: QuantizeOptions | str,
    *,
    calibration: CalibrationOptions | None = None,
    run: RunOptions | None = None,
    device: str = "cpu",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionResult:
    """Convert a checkpoint to block FP8, int8, int4, MXFP4 or W4AFP8.

    Args:
        source: A directory, one .safetensors file, or a hub id `org/name[@revision]`.
        output: The directory to write.
        options: What the output is to be; a string is the name of a scheme, with its defaults.
        calibration: A text that runs through the source first.
        run: How the job runs; nothing here but `max_shard_size` changes a byte of the output.
        device: Where weights are quantized, "cpu" or "cuda".
        dry_run: Decide and check everything, estimate the time, and write nothing.
        progress: Hears how far the job is; a tqdm bar by default, `Silent()` says nothing.

    Raises:
        OptionError: The options are not allowed.
        TilewrightError: The job is refused, with nothing left behind, or it failed or was interrupted; then
            `RunOptions(resume=True)` goes on.
    """
    output = Path(output)
    options = QuantizeOptions(options) if isinstance(options, str) else options
    options, calibrate = split_solver(options, calibration)
    ongoing = Run.of(run, progress)
    checkpoint = ongoing.open(source)
    plan = plan_quantize(checkpoint, options, _available(device))
    if calibrate:
        plan = calibrate.plan(plan, checkpoint, output)
    job = ongoing.check({output: plan}, checkpoint)
    if dry_run:
        return ongoing.result(job, dry_run=True, timed=True)
    ongoing.execute(job, partial(calibrate.run, job, ongoing.progress) if calibrate else tuple)
    consumed = ongoing.options.consume or checkpoint.gone
    loss, told = None, []
    if not consumed:
        written = open_checkpoint(output)
        try:
            with reading(checkpoint):
                loss = measure(checkpoint, written)
            told = [str(loss)] if loss else []
        except CheckpointError as error:  # the output was finished before, from the source as it was then
            told = [f"the output is complete, but what it lost was not measured: {error}"]
    ongoing.tell(told)
    return ongoing.result(job, dry_run=False, loss=loss)


def _available(device: str) -> str:
    check_choice("--device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        hint = "leave --device out to compute on the CPU"
        raise TilewrightError("--device cuda: torch finds no CUDA device", hint=hint)
    return device
