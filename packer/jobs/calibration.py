"""Let a text run through the source before it is quantized: what was asked for, and the steps of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tilewright.kernels.errors import OptionError, TilewrightError, check_choice, check_least

from ..calibrate.apply import calibrated
from ..calibrate.memory import calibration_memory
from ..calibrate.method import CalibrationTargets, Kind, Method
from ..calibrate.store import Store
from ..checkpoint.files import Checkpoint
from ..engine.failures import one_clear_message
from ..engine.job import Job
from ..plan import Plan
from ..progress import Progress
from ..quantize.options import QuantizeOptions
from ..solvers import SOLVERS
from .extras import needing_transformers

CALIBRATING: dict[str, Kind] = {
    "gptq": "gptq",
    "awq": "awq",
    "smooth": "smooth",
    "smooth+gptq": "smooth+gptq",
}  # solvers that need a text
INNER = "mse"  # what chooses scales under them


@dataclass(frozen=True)
class CalibrationOptions:
    """A text that runs through the source, layer by layer: for gptq, awq, and the static activation scales of w4afp8.

    Attributes:
        text: UTF-8 text file; tokenized with the source's own tokenizer.
        windows: Windows of the text, evenly spaced.
        window: Tokens in each of them.
        act_order: Whether gptq rounds the columns with the largest inputs first; None: it does.
        percentile: Share of an activation that its static scale covers, in percent.
    """

    text: Path
    windows: int = 256
    window: int = 128
    act_order: bool | None = None
    percentile: float = 100.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", Path(self.text))
        check_least("--calibrate-windows", self.windows, 1)
        check_least("--calibrate-window", self.window, 2)
        check_least("--percentile", self.percentile, 50)
        if self.percentile > 100:
            raise OptionError(f"--percentile: {self.percentile} is more than 100")


def split_solver(
    options: QuantizeOptions, calibration: CalibrationOptions | None
) -> tuple[QuantizeOptions, Calibration | None]:
    """Options whose solver needs no text, and the calibration that does the rest; None without any.

    Raises:
        OptionError: The solver needs a text and there is none, or options do not belong together.
    """
    check_choice("--solver", options.solver, (*SOLVERS, *CALIBRATING))
    if calibration is None:
        if options.solver in CALIBRATING:
            raise OptionError(f"--solver {options.solver} needs --calibrate TEXT")
        return options, None
    if calibration.act_order is not None and options.solver not in {"gptq", "smooth+gptq"}:
        raise OptionError("--act-order belongs to --solver gptq")
    kind = CALIBRATING.get(options.solver or "", "scales")
    inner = INNER if kind != "scales" else options.solver or INNER
    method = Method(
        kind,
        inner,
        act_order=calibration.act_order is not False,
        percentile=calibration.percentile,
        windows=calibration.windows,
        window=calibration.window,
    )
    text_solver = Calibration(calibration.text, method)
    return (options if kind == "scales" else replace(options, solver=INNER)), text_solver


@dataclass
class Calibration:
    """The calibration of one conversion.

    Attributes:
        text: The text.
        method: What to do with it.
    """

    text: Path
    method: Method

    def plan(self, plan: Plan, checkpoint: Checkpoint, output: Path) -> Plan:
        """The plan that uses what the calibration will find."""
        self._store = Store.beside(output)
        plan, wanted = calibrated(plan, self.method, self.text, self._store)
        self._wanted: CalibrationTargets = wanted
        return plan if plan.rejects else replace(plan, memory=calibration_memory(checkpoint, self.method, wanted))

    def run(self, job: Job, progress: Progress) -> list[str]:
        """Calibrate, while the output of the job is locked; gives what was noticed.

        Raises:
            TilewrightError: The text or the model cannot be used; what was begun for it is removed.
        """
        calibrate = needing_transformers("calibrate.run", "--calibrate").calibrate_checkpoint
        try:
            with one_clear_message(job.root):
                notes: list[str] = calibrate(
                    job.checkpoint, self.text, self.method, self._wanted, self._store, job.plan_hash, progress
                )
                return notes
        except TilewrightError:
            self._store.end_if_empty()
            raise
