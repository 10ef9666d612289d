"""A plan whose weights take the numbers that a calibration will find."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tilewright.kernels.errors import PlanError
from tilewright.kernels.formats import FP8
from tilewright.kernels.tensors import QTensor, Reject

from ..plan import Plan, Task
from ..schemes.base import SIXTEEN_BITS, Target
from ..steps import Part, QuantizeStep
from .method import Method, Wanted
from .store import Store


@dataclass(frozen=True)
class CalibratedStep(QuantizeStep):
    """Writes what calibration found for a matrix; what it did not see is solved without it.

    Attributes:
        store: Where the findings lie.
    """

    store: Store = field(kw_only=True)

    def solve(self, sources: Sequence[torch.Tensor], part: Part, target: Target) -> QTensor:
        """See `QuantizeStep.solve`."""
        found = self.store.find(part.module).weights.get(part.module)
        return found if found is not None else super().solve(sources, part, target)

    def input_scale(self, part: Part, default: float) -> float:
        """See `QuantizeStep.input_scale`."""
        amax = self.store.find(part.module).inputs.get(part.module)
        return amax / FP8.qmax if amax else default


def calibrated(plan: Plan, method: Method, text: Path, store: Store) -> tuple[Plan, Wanted]:
    """The same plan with every weight taken from `store`, and what a calibration has to find for it.

    Raises:
        PlanError: The text cannot be read.
    """
    targets: dict[str, Target] = {}
    inputs: set[str] = set()
    tasks: list[Task] = []
    for task in plan.tasks:
        step = task.step
        if not isinstance(step, QuantizeStep):
            tasks.append(task)
            continue
        solved = {
            part.module: part.target
            for part in step.parts
            if part.target and part.target != SIXTEEN_BITS and part.target.format not in step.keeps
        }
        targets |= solved
        inputs |= {part.module for part in step.parts if part.input_scale}
        fields: dict[str, Any] = {name: getattr(step, name) for name in QuantizeStep.__dataclass_fields__}
        tasks.append(replace(task, step=CalibratedStep(**fields, store=store)))
    try:
        digest = hashlib.sha256(text.read_bytes()).hexdigest()
    except OSError as error:
        raise PlanError(f"{text}: cannot be read: {error.strerror}", hint="--calibrate takes a text file") from error
    wanted = Wanted(targets, frozenset(inputs))
    rejects = plan.rejects
    if not wanted.needed(method):
        reason = f"nothing would use it: solver {plan.options['solver']}, and no static activation scales are written"
        rejects += (Reject(f"--calibrate {text.name}", reason, "--solver gptq uses it, and so does w4afp8"),)
    options = plan.options | {"solver": plan.options["solver"] if method.kind == "scales" else method.kind}
    options |= {"calibration": asdict(method) | {"text_sha256": digest}}
    return replace(plan, tasks=tuple(tasks), options=options, rejects=rejects), wanted
