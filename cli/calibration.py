"""The options of `quantize-model` that let a text run through the source first, and that run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import say, stacked

if TYPE_CHECKING:
    from tilewright.packer.calibrate.method import CalibrationTargets, Method
    from tilewright.packer.calibrate.store import Store
    from tilewright.packer.checkpoint.files import Checkpoint
    from tilewright.packer.plan import Plan

SOLVERS = ("gptq", "awq")  # solvers that calibrate; a test compares
INNER = "mse"  # what chooses scales under them

calibration_options = stacked(
    click.option(
        "--calibrate",
        "text",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="TEXT",
        help="Run this text through the source, layer by layer: for gptq, awq, and the static scales of w4afp8.",
    ),
    click.option(
        "--calibrate-windows",
        "windows",
        type=click.IntRange(1),
        default=256,
        show_default=True,
        help="Windows of the text, evenly spaced.",
    ),
    click.option(
        "--calibrate-window",
        "window",
        type=click.IntRange(2),
        default=128,
        show_default=True,
        metavar="TOKENS",
        help="Tokens in each of them.",
    ),
    click.option(
        "--act-order/--no-act-order",
        default=None,
        help="Whether gptq rounds the columns with the largest inputs first; it does by default.",
    ),
    click.option(
        "--percentile",
        type=click.FloatRange(50, 100),
        default=100.0,
        show_default=True,
        help="Share of an activation that its static scale covers, in percent.",
    ),
)


@dataclass
class Calibration:
    """What was asked for, and what it means for a plan.

    Attributes:
        text: The text.
        method: What to do with it.
    """

    text: Path
    method: Method

    @staticmethod
    def taken_from(options: dict[str, Any]) -> Calibration | None:
        """Take the options above, and a solver that calibrates, out of `options`."""
        from tilewright.packer.calibrate.method import Method

        text = options.pop("text")
        fields = {name: options.pop(name) for name in ("windows", "window", "percentile")}
        order = options.pop("act_order")
        solver = options["solver"]
        if order is not None and solver != "gptq":
            raise click.UsageError("--act-order belongs to --solver gptq")
        if solver in SOLVERS:
            if text is None:
                raise click.UsageError(f"--solver {solver} needs --calibrate TEXT")
            options["solver"] = INNER
            return Calibration(text, Method(solver, INNER, act_order=order is not False, **fields))
        return Calibration(text, Method("scales", solver or INNER, **fields)) if text else None

    def planned(self, plan: Plan, checkpoint: Checkpoint, output: Path) -> Plan:
        """The plan that uses what the calibration will find."""
        from tilewright.packer.calibrate.apply import calibrated
        from tilewright.packer.calibrate.memory import calibration_memory
        from tilewright.packer.calibrate.store import Store

        self._store: Store = Store.beside(output)
        plan, wanted = calibrated(plan, self.method, self.text, self._store)
        self._wanted: CalibrationTargets = wanted
        return plan if plan.rejects else replace(plan, memory=calibration_memory(checkpoint, self.method, wanted))

    def run(self, plan: Plan, checkpoint: Checkpoint, key: str) -> Plan:
        """Calibrate; the plan returned has what was noticed among its notes."""
        from tilewright.kernels.errors import TilewrightError

        try:
            from tilewright.packer.calibrate.run import calibrate_checkpoint
        except ImportError as error:
            raise TilewrightError(f"--calibrate needs {error.name}", hint="pip install 'tilewright[hf]'") from error
        notes = calibrate_checkpoint(
            checkpoint,
            self.text,
            self.method,
            self._wanted,
            self._store,
            key,
            lambda done, total: say(f"calibrated layer {done} of {total}"),
        )
        for note in notes:
            say(f"note: {note}")
        return replace(plan, notes=plan.notes + tuple(notes))

    def end(self) -> None:
        """Remove what the calibration has left beside the output."""
        self._store.end()
