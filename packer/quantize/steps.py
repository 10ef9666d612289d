"""The computations that quantize: one matrix, or one expert of a stack, into the tensors of its layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.ops.convert import all_finite
from tilewright.kernels.tensors import QTensor, TensorSpec

from ..checkpoint.encoding import Decoder, first_bad
from ..checkpoint.matrices import take_rows
from ..plan import NotFiniteError, Step, Work
from ..schemes.scheme import StorageSpec
from ..solvers import SOLVERS
from ..solvers.blocks import block_amax, encode
from ..solvers.solver import Solver

DAMAGED = "the source is damaged or its training diverged; --exclude copies the module as it is"
STRIP = 1 << 20  # elements in work at a time


class BadElementError(Exception):
    """An element of a matrix, as its decoder gives it, is NaN or infinite; row and column say which."""

    def __init__(self, row: int, column: int, value: float) -> None:
        super().__init__(f"element [{row}, {column}] is {value}")
        self.row, self.column, self.value = row, column, value


def quantize_matrix(
    read: Callable[[int, int], torch.Tensor],
    shape: tuple[int, int],
    fmt: WeightFormat,
    solver: Solver,
    device: str = "cpu",
) -> QTensor:
    """Quantize a matrix strip by strip, so that only one strip is ever in fp32.

    Args:
        read: (start, stop) -> rows [stop - start, K] in fp32, bf16 or fp16.
        shape: (N, K).
        fmt: Weight format; a 16-bit one just rounds.
        solver: Chooses the scales.
        device: Where the arithmetic is done; the numbers are the same everywhere.

    Raises:
        BadElementError: A value is NaN or infinite.
    """
    n, k = shape
    unit = max(fmt.block_n, 1)
    height = max(STRIP // max(k, 1) // unit, 1) * unit
    codes = torch.empty(n, k, dtype=fmt.code_dtype)
    scales = torch.empty(fmt.scale_rows(n), fmt.scale_columns(k)) if fmt.has_scales else None
    for start in range(0, n, height):
        strip = read(start, min(start + height, n)).to(device)
        strip = strip if strip.stride(1) == 1 else strip.contiguous()  # once, not in every operator
        stop = start + len(strip)
        amax = block_amax(strip, fmt) if fmt.has_scales else strip.abs().amax()
        if not torch.isfinite(amax).all():
            row, column = (~torch.isfinite(strip)).nonzero()[0].tolist()
            raise BadElementError(start + row, column, float(strip[row, column]))
        if scales is None:
            codes[start:stop] = fmt.encode(strip)
            continue
        found = solver.scales(strip, amax, fmt)
        codes[start:stop] = encode(strip, found, fmt)
        scales[start // unit : start // unit + len(found)] = found
    return QTensor(fmt, codes, scales)


@dataclass(frozen=True, slots=True)
class Part:
    """One output matrix: some rows of the source matrix.

    Attributes:
        module: Path of the output module.
        rows: (start, stop, step) in the source matrix.
        target: How it is stored; None keeps the rows in the source's dtype as `<module>.weight`.
        input_scale: Name and value of a static activation scale to write beside it.
    """

    module: str
    rows: tuple[int, int, int]
    target: StorageSpec | None
    input_scale: tuple[str, float] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored in fewer than 16 bits."""
        return self.target is not None and self.target.is_quantized

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(range(*self.rows))

    def specs(self, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Name and specification of every output tensor, for a source of `k` columns and this dtype."""
        if self.target is None:
            return {f"{self.module}.weight": TensorSpec(dtype, (self.count, k))}
        made = self.target.checkpoint_layout.specs(self.target.weight_format, (self.count, k))
        specs = {f"{self.module}.{suffix}": spec for suffix, spec in made.items()}
        if self.input_scale:
            specs[self.input_scale[0]] = TensorSpec(torch.bfloat16, (1,))
        return specs

    def renamed(self, names: Mapping[str, str]) -> Part:
        """The same part under other names; `names` maps those of the output tensors."""
        before, now = next(pair for pair in names.items() if pair[0].startswith(f"{self.module}."))
        module = now.removesuffix(before.removeprefix(self.module))
        scale = (names[self.input_scale[0]], self.input_scale[1]) if self.input_scale else None
        return Part(module, self.rows, self.target, scale)


@dataclass(frozen=True)
class QuantizeStep(Step):
    """Quantizes one matrix, or one expert of a stack, into one or more output matrices.

    Attributes:
        decoder: How the source's values are read.
        parts: The output matrices.
        solver: Id of the solver.
        k: Columns of the matrix.
        kept: Modules of the parts that the source already has in their format, whose codes are taken over as they are.
        device: Where the arithmetic is done.
    """

    decoder: Decoder
    parts: tuple[Part, ...]
    solver: str
    k: int
    kept: tuple[str, ...] = ()
    device: str = "cpu"

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Turn the source's tensors into the output tensors, by name.

        Raises:
            NotFiniteError: A source holds a NaN or an infinity.
            SchemeError: A code times its scale is one.
        """
        outputs: dict[str, torch.Tensor] = {}
        for part in self.parts:
            if part.target is None:
                outputs[f"{part.module}.weight"] = self.decoder.raw(sources, slice(*part.rows)).contiguous()
                continue
            packed = part.target.checkpoint_layout.pack(self.solve(sources, part, part.target))
            outputs |= {f"{part.module}.{suffix}": tensor for suffix, tensor in packed.items()}
            if part.input_scale:
                name, default = part.input_scale
                outputs[name] = torch.tensor([self.input_scale(part, default)], dtype=torch.bfloat16)
        return outputs

    def work(self) -> Iterable[Work]:
        """See `Step.work`: what is quantized; codes that are taken over and rows that are kept cost nothing here."""
        for part in self.parts:
            if part.target is not None and part.module not in self.kept:
                kind = (part.target.format, self.solver, self.device)
                yield Work(kind, part.count * self.k, partial(self._try, part.target))

    def renamed(self, names: Mapping[str, str]) -> QuantizeStep:
        """See `Step.renamed`."""
        parts = tuple(part.renamed(names) for part in self.parts)
        kept = (now.module for before, now in zip(self.parts, parts, strict=True) if before.module in self.kept)
        return replace(self, parts=parts, kept=tuple(kept))

    def _try(self, target: StorageSpec, weight: torch.Tensor) -> None:
        n, k = weight.shape
        solver = SOLVERS[self.solver]
        q = quantize_matrix(lambda first, last: weight[first:last], (n, k), target.weight_format, solver, self.device)
        target.checkpoint_layout.pack(q)

    def input_scale(self, part: Part, default: float) -> float:
        """The static activation scale of a part; `default` unless activations are known."""
        return default

    def solve(self, sources: Sequence[torch.Tensor], part: Part, target: StorageSpec) -> QTensor:
        """Codes and scales of a part."""
        fmt = target.weight_format
        if part.module in self.kept and (kept := _keep(self.decoder.codes(sources, fmt), part.rows)):
            return kept
        first, _, step = part.rows

        def read(start: int, stop: int) -> torch.Tensor:
            rows = self.decoder.rows(sources, slice(first + start * step, first + stop * step, step))
            return target.rotation.of(rows) if target.rotation else rows

        try:
            solver = SOLVERS[self.solver]
            return quantize_matrix(read, (part.count, self.k), fmt, solver, self.device)
        except BadElementError as error:
            if bad := first_bad(sources):
                raise NotFiniteError(*bad, DAMAGED) from None
            where = f"{part.module}[{error.row}, {error.column}] (code times scale)"
            raise SchemeError(f"{where} is {error.value}; only finite weights can be converted", hint=DAMAGED) from None


def _keep(q: QTensor | None, rows: tuple[int, int, int]) -> QTensor | None:
    """Some rows of a weight with their codes untouched; None where blocks do not allow it or a scale is unfit."""
    q = None if q is None else take_rows(q, rows)
    if q is None:
        return None
    if not all_finite(q.codes):
        return None
    if q.scales is None:
        return QTensor(q.format, q.codes.contiguous())
    if not bool((torch.isfinite(q.scales) & (q.scales > 0)).all()):
        return None
    return QTensor(q.format, q.codes.contiguous(), q.scales.contiguous())


@dataclass(frozen=True)
class SplitStep(Step):
    """Cuts one expert's row of a stacked bias into the biases of its matrices, bytes unchanged.

    Attributes:
        outputs: Output name and (start, stop, step) of each.
    """

    outputs: tuple[tuple[str, tuple[int, int, int]], ...]

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Cut the bias."""
        return {name: sources[0][slice(*rows)].contiguous() for name, rows in self.outputs}
