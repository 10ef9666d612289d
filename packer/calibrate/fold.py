"""Move scales of channels from norms into the weights that read them, where that helps quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tilewright.kernels.errors import SchemeError

from ..families.experts import LONG
from ..families.norms import EXPERTS, Fold
from ..solvers import SOLVERS
from ..solvers.smooth import Reader, channel_exponents
from .method import CalibrationTargets, Method
from .observe import ExpertInputs, Observed
from .statistics import InputStatistics
from .store import Solution


@dataclass(frozen=True)
class _Matrix:
    """A weight that reads the norm: module path, and its values [N, K] inside the layer."""

    name: str
    values: torch.Tensor


@dataclass(frozen=True)
class Folder:
    """Folds the norms of one layer.

    Attributes:
        method: What is asked for.
        wanted: What the plan needs.
        path: Path of the layer.
        modules: Path -> module of the layer, filled with the source's weights.
        observed: What they were fed.
    """

    method: Method
    wanted: CalibrationTargets
    path: str
    modules: Mapping[str, nn.Module]
    observed: Observed

    def fold(self, solution: Solution) -> None:
        """Choose and apply scales in the layer's modules; what changed is put into `solution`.

        Raises:
            SchemeError: Something reads a norm that the family's table does not list.
        """
        for fold in self.wanted.folds:
            norm = self.modules.get(f"{self.path}.{fold.norm}")
            readers = self._readers(fold)
            targets = [matrix for matrix in readers if matrix.name in self.wanted.targets]
            if norm is None or not targets or not self._movable(fold, readers):
                continue
            exponents = channel_exponents(
                [self._reader(matrix) for matrix in targets], self._hessian(fold), SOLVERS[self.method.inner]
            )
            weight = norm.weight
            assert isinstance(weight, torch.Tensor)
            exponents[weight == 0] = 0  # so that the exponents can be read off the norm
            self._apply(fold, weight, readers, torch.exp2(exponents.to(torch.float32)), solution)

    def _readers(self, fold: Fold) -> list[_Matrix]:
        found: list[_Matrix] = []
        for reader in fold.readers:
            name = f"{self.path}.{reader}"
            module = self.modules.get(name)
            if module is None:
                continue
            if reader != EXPERTS:
                assert isinstance(module.weight, torch.Tensor)
                found.append(_Matrix(name, module.weight))
                continue
            assert isinstance(module.gate_up_proj, torch.Tensor)
            for expert, stack in enumerate(module.gate_up_proj):
                gate, up = stack.chunk(2)
                found += [_Matrix(f"{name}.{expert}.{LONG.gate}", gate), _Matrix(f"{name}.{expert}.{LONG.up}", up)]
        return found

    def _reader(self, matrix: _Matrix) -> Reader:
        target = self.wanted.targets[matrix.name]
        return Reader(matrix.values, target.weight_format, target.rotation)

    def _movable(self, fold: Fold, readers: list[_Matrix]) -> bool:
        """Whether everything that has to change can be written."""
        names = {f"{self.path}.{reader}" for reader in fold.readers}
        shared = [self.observed.linears[name] for name in names if name in self.observed.linears]
        for name, statistics in self.observed.linears.items():
            if name not in names and any(statistics is other for other in shared):
                raise SchemeError(
                    f"{name}: reads what {self.path}.{fold.norm} gives, which awq does not know of this family",
                    hint="use --solver gptq",
                )
        unquantized = [matrix.name for matrix in readers if matrix.name not in self.wanted.targets]
        return all(f"{name}.weight" in self.wanted.copied for name in (f"{self.path}.{fold.norm}", *unquantized))

    def _inputs(self, fold: Fold) -> ExpertInputs | None:
        return self.observed.experts.get(f"{self.path}.{EXPERTS}") if EXPERTS in fold.readers else None

    def _hessian(self, fold: Fold) -> torch.Tensor:
        names = (f"{self.path}.{reader}" for reader in fold.readers)
        statistics = next((self.observed.linears[name] for name in names if name in self.observed.linears), None)
        inputs = self._inputs(fold)
        if statistics is None:
            assert inputs is not None
            statistics = InputStatistics(inputs.tokens[0].shape[1])
            for tokens in inputs.tokens:
                statistics.add(tokens)
        assert statistics.hessian is not None
        return statistics.hessian

    def _apply(
        self, fold: Fold, norm: torch.Tensor, readers: list[_Matrix], factors: torch.Tensor, solution: Solution
    ) -> None:
        solver = SOLVERS[self.method.inner]
        self._replace(f"{self.path}.{fold.norm}.weight", norm / factors, solution)
        for matrix in readers:
            target = self.wanted.targets.get(matrix.name)
            if target is None:
                self._replace(f"{matrix.name}.weight", matrix.values * factors, solution)
            else:
                solution.weights[matrix.name] = self._reader(matrix).quantized(factors, solver)
            matrix.values.mul_(factors)
        inputs = self._inputs(fold)
        if inputs is not None:
            inputs.tokens = [tokens / factors for tokens in inputs.tokens]

    def _replace(self, name: str, values: torch.Tensor, solution: Solution) -> None:
        stored = values.to(self.wanted.copied[name])
        assert torch.equal(stored.to(torch.float32), values), f"{name}: powers of two left the range of its type"
        solution.replaced[name] = stored
