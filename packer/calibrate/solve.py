"""From what one layer saw to what is written about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from tilewright.kernels.errors import SchemeError

from ..families.experts import LONG
from ..malloc_trim import FreedMemory
from ..solvers import SOLVERS
from ..solvers.gptq import ErrorFeedback
from .fold import Folder
from .memory import ROUNDING, SOLVING
from .method import CalibrationTargets, Method
from .observe import ENOUGH, ExpertInputs, Observed
from .statistics import InputStatistics
from .store import Solution

LISTED = 20  # experts that the note on rare ones names


@dataclass
class LayerSolver:
    """Solves the Linears and experts of one layer.

    Attributes:
        method: What is asked for.
        wanted: What the plan needs.
        path: Path of the layer.
        solution: What was found so far.
        freed: Memory that solving has used and no longer does.
    """

    method: Method
    wanted: CalibrationTargets
    path: str
    solution: Solution = field(default_factory=Solution)
    freed: FreedMemory = field(default_factory=FreedMemory)

    @property
    def with_hessian(self) -> bool:
        """Whether Hessians of Linears are needed."""
        return self.method.feeds_back or self.method.kind == "awq"

    @property
    def with_sample(self) -> bool:
        """Whether some of the inputs of Linears are needed themselves."""
        return self.method.smooths

    @property
    def feeds_back(self) -> bool:
        """Whether Hessians of every weight are needed."""
        return self.method.feeds_back

    def solve(self, modules: Mapping[str, nn.Module], observed: Observed) -> Solution:
        """Solve everything that was observed.

        Args:
            modules: Path -> module of the layer, filled with the source's weights.
            observed: What they were fed.
        """
        if self.method.moves:
            Folder(self.method, self.wanted, self.path, modules, observed).fold(self.solution)
        for name, statistics in observed.linears.items():
            weight = modules[name].weight
            assert isinstance(weight, torch.Tensor)
            self._weight(name, weight, statistics)
        for path, inputs in observed.experts.items():
            for expert, count in enumerate(inputs.counts().tolist()):
                self.solution.tokens[f"{path}.{expert}"] = count
                self._expert(f"{path}.{expert}", inputs, expert)
        return self.solution

    def _expert(self, path: str, inputs: ExpertInputs, expert: int) -> None:
        names = [f"{path}.{projection}" for projection in LONG.projections]
        if not any(name in self.wanted.targets or name in self.wanted.inputs for name in names):
            return
        tokens, counted = inputs.of(expert)
        outer = InputStatistics(tokens.shape[1], self.feeds_back)
        outer.add(tokens, counted)
        for name, weight in zip(names, inputs.module.gate_up_proj[expert].chunk(2), strict=False):
            self._weight(name, weight, outer)
        fed = inputs.inner(expert, tokens)
        inner = InputStatistics(fed.shape[1], self.feeds_back)
        inner.add(fed, counted)
        self._weight(names[2], inputs.module.down_proj[expert], inner)

    def _weight(self, name: str, weight: torch.Tensor, statistics: InputStatistics) -> None:
        if name in self.wanted.inputs:
            self.solution.inputs[name] = statistics.percentile(self.method.percentile)
        target = self.wanted.targets.get(name)
        if target is None or not self.feeds_back:
            return
        if not bool(torch.isfinite(weight).all()):
            raise SchemeError(f"{name}.weight: holds a NaN or an infinity; only finite weights can be quantized")
        assert statistics.hessian is not None
        hessian = statistics.hessian
        if rotation := target.rotation:
            weight, hessian = rotation.of(weight), rotation.of(rotation.of(hessian).T)
        solver = ErrorFeedback(SOLVERS[self.method.inner], act_order=self.method.act_order)
        self.solution.weights[name] = solver.solve(weight, hessian, target.weight_format)
        self.freed.add(SOLVING * statistics.hessian.numel() + ROUNDING * weight.numel())


def rarely_hit(tokens: Mapping[str, int]) -> list[str]:
    """A note on the experts that saw too little to be judged by it alone."""
    rare = {path: count for path, count in tokens.items() if count < ENOUGH}
    if not rare:
        return []
    rarest = sorted(rare.items(), key=lambda item: item[1])[:LISTED]
    listed = ", ".join(f"{path} ({count})" for path, count in rarest)
    more = f" and {len(rare) - LISTED} more" if len(rare) > LISTED else ""
    return [
        f"{len(rare)} of {len(tokens)} experts saw fewer than {ENOUGH} tokens of the calibration text and borrowed "
        f"others of their layer (own tokens in brackets, rarest first): {listed}{more}"
    ]
