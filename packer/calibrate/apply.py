"""A plan whose weights take the numbers that a calibration will find."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tilewright.kernels.errors import PlanError
from tilewright.kernels.formats import FP8
from tilewright.kernels.tensors import QTensor, Reject

from ..families import known_folds, known_passages
from ..families.config import head_size
from ..families.norms import in_folds
from ..plan import AnyTask, Copy, Plan, Step, Task
from ..quantize.steps import Part, QuantizeStep
from ..schemes.scheme import SIXTEEN_BITS, StorageSpec
from .method import CalibrationTargets, Method
from .store import Store


@dataclass(frozen=True)
class CalibratedStep(QuantizeStep):
    """Writes what calibration found for a matrix; what it did not see is solved without it.

    Attributes:
        store: Where the findings lie.
    """

    store: Store = field(kw_only=True)

    def solve(self, sources: Sequence[torch.Tensor], part: Part, target: StorageSpec) -> QTensor:
        """See `QuantizeStep.solve`."""
        found = self.store.find(part.module).weights.get(part.module)
        return found if found is not None else super().solve(sources, part, target)

    def input_scale(self, part: Part, default: float) -> float:
        """See `QuantizeStep.input_scale`."""
        amax = self.store.find(part.module).inputs.get(part.module)
        return amax / FP8.qmax if amax else default


@dataclass(frozen=True)
class FoldedStep(Step):
    """Copies a tensor, or writes what calibration made of it.

    Attributes:
        name: The source tensor.
        output: Its name in the output.
        store: Where the findings lie.
    """

    name: str
    output: str
    store: Store

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensor, by its output name."""
        return {self.output: self.store.find(self.name).replaced.get(self.name, sources[0])}


def calibrated(plan: Plan, method: Method, text: Path, store: Store) -> tuple[Plan, CalibrationTargets]:
    """The same plan with every weight taken from `store`, and what a calibration has to find for it.

    Raises:
        PlanError: The text cannot be read.
    """
    try:
        digest = hashlib.sha256(text.read_bytes()).hexdigest()
    except OSError as error:
        raise PlanError(f"{text}: cannot be read: {error.strerror}", hint="--calibrate takes a text file") from error
    wanted = _wanted(plan, method)
    rejects = plan.rejects
    if method.moves and not wanted.folds:
        kind, known = plan.config.get("model_type"), ", ".join(known_folds())
        reason = f"it is not known which weights of model_type `{kind}` read which norm"
        rejects += (
            Reject(f"--solver {method.kind}", reason, f"known are {known}; --solver gptq needs no such knowledge"),
        )
    elif not wanted.needed(method):
        reason = f"nothing would use it: solver {plan.options['solver']}, and no static activation scales are written"
        rejects += (Reject(f"--calibrate {text.name}", reason, "--solver gptq uses it, and so does w4afp8"),)
    options = plan.options | {"solver": plan.options["solver"] if method.kind == "scales" else method.kind}
    options |= {"calibration": asdict(method) | {"text_sha256": digest}}
    tasks = tuple(Task(task.sources, task.pieces, _step(task, wanted, store)) for task in plan.tasks)
    return replace(plan, tasks=tasks, options=options, rejects=rejects), wanted


def _wanted(plan: Plan, method: Method) -> CalibrationTargets:
    targets: dict[str, StorageSpec] = {}
    inputs: set[str] = set()
    copied: dict[str, torch.dtype] = {}
    kind = plan.config.get("model_type", "")
    folds = known_folds().get(kind, ()) if method.moves else ()
    passages = known_passages().get(kind, ()) if method.smooths else ()
    for task in plan.tasks:
        step = task.step
        if isinstance(step, QuantizeStep):
            targets |= {
                part.module: part.target
                for part in step.parts
                if part.target and part.target != SIXTEEN_BITS and part.module not in step.kept
            }
            inputs |= {part.module for part in step.parts if part.input_scale}
        elif isinstance(step, Copy) and len(task.sources) == 1 and in_folds(task.sources[0].name, folds, passages):
            copied[task.sources[0].name] = task.pieces[0].spec.dtype
    return CalibrationTargets(targets, frozenset(inputs), copied, folds, passages, head_size(plan.config))


def _step(task: AnyTask, wanted: CalibrationTargets, store: Store) -> Step | Copy:
    if isinstance(task.step, QuantizeStep):
        fields: dict[str, Any] = {name: getattr(task.step, name) for name in QuantizeStep.__dataclass_fields__}
        return CalibratedStep(**fields, store=store)
    name = task.sources[0].name
    if isinstance(task.step, Copy) and name in wanted.copied:
        return FoldedStep(name, task.pieces[0].name, store)
    return task.step
