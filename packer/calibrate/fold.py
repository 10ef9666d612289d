"""Move scales of channels from what writes an input into the weights that read it, where that helps quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tilewright.kernels.errors import SchemeError

from ..families.experts import LONG
from ..families.norms import EXPERTS, Fold, Passage, of_rows
from ..solvers import SOLVERS
from ..solvers.smooth import Reader, channel_exponents, smoothing_exponents
from .method import CalibrationTargets, Method
from .observe import ExpertInputs, Observed
from .statistics import InputStatistics
from .store import Solution

QUICK = "rtn"


@dataclass(frozen=True)
class _Matrix:
    """A weight whose columns or rows are multiplied: module path, and its values [N, K] inside the layer."""

    name: str
    values: torch.Tensor


@dataclass
class Folder:
    """Folds one layer.

    Attributes:
        method: What is asked for.
        wanted: What the plan needs.
        path: Path of the layer.
        modules: Path -> module of the layer, filled with the source's weights.
        observed: What they were fed.
        moved: Matrices whose values are no longer those of the source, by name.
    """

    method: Method
    wanted: CalibrationTargets
    path: str
    modules: Mapping[str, nn.Module]
    observed: Observed
    moved: dict[str, torch.Tensor] = field(default_factory=dict)

    def fold(self, solution: Solution) -> None:
        """Choose and apply scales in the layer's modules; what changed is put into `solution`.

        Raises:
            SchemeError: Something reads a norm, or what a Linear gives, that the family's table does not list.
        """
        for fold in self.wanted.folds:
            norm = self.modules.get(f"{self.path}.{fold.norm}")
            readers = self._readers(fold)
            targets = [matrix for matrix in readers if matrix.name in self.wanted.targets]
            if norm is None or not targets or not self._movable(fold, readers):
                continue
            exponents = self._exponents(targets, self._statistics(fold))
            weight = norm.weight
            assert isinstance(weight, torch.Tensor)
            exponents[weight == 0] = 0  # so that the exponents can be read off the norm
            self._apply(fold, weight, readers, torch.exp2(exponents.to(torch.float32)), solution)
        for passage in self.wanted.passages:
            self._pass(passage, solution)
        solver = SOLVERS[self.method.inner]
        for name, values in self.moved.items():
            target = self.wanted.targets.get(name)
            if target is None:
                self._replace(f"{name}.weight", values, solution)
            elif not self.method.feeds_back:
                ones = torch.ones(values.shape[1])
                solution.weights[name] = self._reader(_Matrix(name, values)).quantized(ones, solver)

    def _exponents(self, targets: Sequence[_Matrix], statistics: InputStatistics, repeats: int = 1) -> torch.Tensor:
        """Exponents of the channels of an input that some weights share; `repeats` heads have the same."""
        readers, solver = [self._reader(matrix) for matrix in targets], SOLVERS[self.method.inner]
        if self.method.kind == "awq":
            assert statistics.hessian is not None
            return channel_exponents(readers, statistics.hessian, solver)
        if not any(reader.format.is_coarse for reader in readers):
            solver = SOLVERS[QUICK]  # a search of scales would gain nothing, and take most of the time
        return smoothing_exponents(readers, statistics.sample, solver, repeats, self.wanted.head_size)

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
        self._refuse_strangers(f"what {self.path}.{fold.norm} gives", {f"{self.path}.{name}" for name in fold.readers})
        return self._written(f"{self.path}.{fold.norm}", *(matrix.name for matrix in readers))

    def _written(self, *names: str) -> bool:
        unquantized = [name for name in names if name not in self.wanted.targets]
        return all(f"{name}.weight" in self.wanted.copied for name in unquantized)

    def _refuse_strangers(self, what: str, names: set[str]) -> None:
        """Nothing else may read the input of these modules."""
        shared = [self.observed.linears[name] for name in names if name in self.observed.linears]
        for name, statistics in self.observed.linears.items():
            if name not in names and any(statistics is other for other in shared):
                raise SchemeError(
                    f"{name}: reads {what}, which {self.method.kind} does not know of this family",
                    hint="use --solver gptq",
                )

    def _inputs(self, fold: Fold) -> ExpertInputs | None:
        return self.observed.experts.get(f"{self.path}.{EXPERTS}") if EXPERTS in fold.readers else None

    def _statistics(self, fold: Fold) -> InputStatistics:
        names = (f"{self.path}.{reader}" for reader in fold.readers)
        statistics = next((self.observed.linears[name] for name in names if name in self.observed.linears), None)
        inputs = self._inputs(fold)
        if statistics is None:
            assert inputs is not None
            statistics = InputStatistics(inputs.tokens[0].shape[1], with_sample=self.method.smooths)
            for tokens in inputs.tokens:
                statistics.add(tokens)
        return statistics

    def _apply(
        self, fold: Fold, norm: torch.Tensor, readers: list[_Matrix], factors: torch.Tensor, solution: Solution
    ) -> None:
        self._replace(f"{self.path}.{fold.norm}.weight", norm / factors, solution)
        for matrix in readers:
            matrix.values.mul_(factors)
            self.moved[matrix.name] = matrix.values
        inputs = self._inputs(fold)
        if inputs is not None:
            inputs.tokens = [tokens / factors for tokens in inputs.tokens]
        self._divide([f"{self.path}.{reader}" for reader in fold.readers], factors)

    def _divide(self, names: Sequence[str], factors: torch.Tensor) -> None:
        """Statistics of what these Linears read, as it is now; those that share one object once."""
        found = {id(seen): seen for name, seen in self.observed.linears.items() if name in names}
        for statistics in found.values():
            statistics.divide(factors)

    def _pass(self, passage: Passage, solution: Solution) -> None:
        """Move scales from the rows of one Linear into the columns of another, wherever the layer has the two."""
        matrices = {name.removeprefix(f"{self.path}."): matrix for name, matrix in self._linears().items()}
        for writer, reader in passage.pairs(matrices):
            source, target = matrices[writer], matrices[reader]
            statistics = self._read_by(target)
            if statistics is None or target.name not in self.wanted.targets:
                continue
            self._refuse_strangers(f"what {source.name} gives", {target.name})
            bias = self._bias(source.name)
            if not self._written(source.name) or (bias is not None and f"{source.name}.bias" not in self.wanted.copied):
                continue
            rows, repeats = len(source.values), target.values.shape[1] // len(source.values)
            if repeats * rows != target.values.shape[1] or (repeats > 1 and not passage.by_head):
                raise SchemeError(
                    f"{target.name}: {target.values.shape[1]} columns do not read {rows} rows of {writer}"
                )
            exponents = self._exponents([target], statistics, repeats)
            columns = torch.exp2(exponents.to(torch.float32))
            factors = of_rows(columns, repeats, self.wanted.head_size)
            source.values.div_(factors[:, None])
            target.values.mul_(columns)
            self.moved |= {matrix.name: matrix.values for matrix in (source, target)}
            if bias is not None:
                bias.div_(factors)
                self._replace(f"{source.name}.bias", bias, solution)
            self._divide([target.name], columns)

    def _linears(self) -> dict[str, _Matrix]:
        """Linears and the matrices of experts by their paths."""
        found: dict[str, _Matrix] = {}
        for name, module in self.modules.items():
            if name in self.observed.linears:
                assert isinstance(module.weight, torch.Tensor)
                found[name] = _Matrix(name, module.weight)
        for name, inputs in self.observed.experts.items():
            for expert in range(inputs.experts):
                up = inputs.module.gate_up_proj[expert].chunk(2)[1]
                parts = {LONG.up: up, LONG.down: inputs.module.down_proj[expert]}
                found |= {
                    f"{name}.{expert}.{kind}": _Matrix(f"{name}.{expert}.{kind}", part) for kind, part in parts.items()
                }
        return found

    def _read_by(self, matrix: _Matrix) -> InputStatistics | None:
        """What a Linear, or the last matrix of an expert, reads."""
        if matrix.name in self.observed.linears:
            return self.observed.linears[matrix.name]
        container, expert, _ = matrix.name.rsplit(".", 2)
        inputs = self.observed.experts[container]
        tokens, counted = inputs.of(int(expert))
        statistics = InputStatistics(matrix.values.shape[1], with_hessian=False, with_sample=True)
        statistics.add(inputs.inner(int(expert), tokens), counted)
        return statistics if statistics.tokens else None

    def _bias(self, name: str) -> torch.Tensor | None:
        module = self.modules.get(name)
        bias = getattr(module, "bias", None) if module is not None else None
        return bias if isinstance(bias, torch.Tensor) else None

    def _replace(self, name: str, values: torch.Tensor, solution: Solution) -> None:
        stored = values.to(self.wanted.copied[name])
        assert torch.equal(stored.to(torch.float32), values), f"{name}: powers of two left the range of its type"
        solution.replaced[name] = stored
