"""The computations of packing and unpacking: pure, picklable, the same bytes wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.ops.convert import all_finite
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

from ..checkpoint.encoding import first_bad
from ..checkpoint.matrices import Matrix
from ..checkpoint.packed import join_rows, split_rows
from ..plan import NotFiniteError, Step
from .sharding import RankSlice


@dataclass(frozen=True)
class PackedPart:
    """Matrices that become one packed matrix, one under the other.

    Attributes:
        output: Name of the packed module.
        layout: Its layout.
        format: What its codes mean; the matrices give codes of it unchanged.
        matrices: The matrix of each part.
        biases: Whether the bias of each part follows its tensors.
        rank_slice: Which share of each matrix is packed.
        parts: Equal parts of the packed rows that are padded and scaled each on its own.
        leading: Rows and columns of zeros that are put before each share.
    """

    output: str
    layout: Layout
    format: WeightFormat
    matrices: tuple[Matrix, ...]
    biases: bool = False
    rank_slice: RankSlice = RankSlice()
    parts: int = 1
    leading: tuple[int, int] = (0, 0)

    @property
    def count(self) -> int:
        """How many stored tensors `pack` takes."""
        return sum(len(matrix.sources) + self.biases for matrix in self.matrices)

    def pack(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The packed tensors by full name."""
        remaining = iter(tensors)
        parts = []
        biases = []
        for matrix in self.matrices:
            codes = read_codes(matrix, [next(remaining) for _ in matrix.sources], self.format)
            parts.append(self.rank_slice.take(codes, self.leading))
            if self.biases:
                bias = next(remaining)[slice(*matrix.rows)]
                biases.append(self.rank_slice.take_bias(bias, self.leading[0]).to(torch.float32))
        named = {
            f"{self.output}.{suffix}": tensor
            for suffix, tensor in self.layout.pack(join_rows(parts, self.parts)).items()
        }
        if self.biases:
            named[f"{self.output}.bias"] = torch.cat(biases)
        return named


@dataclass(frozen=True)
class PackStep(Step):
    """Packs one Linear, or one expert's gate, up and down.

    Attributes:
        parts: What to make of the sources, which follow one another in this order.
    """

    parts: tuple[PackedPart, ...]

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The packed tensors by name.

        Raises:
            NotFiniteError: A source holds a NaN or an infinity, as a weight, a code or a scale.
        """
        if bad := first_bad(sources):
            raise NotFiniteError(*bad, "the source is damaged; fetch it or convert it again")
        result: dict[str, torch.Tensor] = {}
        start = 0
        for part in self.parts:
            result.update(part.pack(sources[start : start + part.count]))
            start += part.count
        return result


@dataclass(frozen=True)
class UnpackStep(Step):
    """Turns one packed matrix back into the tensors of its sources.

    Attributes:
        spec: The packed module.
        layout: The checkpoint layout of the sources.
        names: Module names of the parts.
    """

    spec: ModuleSpec
    layout: Layout
    names: tuple[str, ...]

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of the sources by name; `sources` are the packed ones in the order of `spec.tensors()`."""
        spec = self.spec
        tensors = dict(zip(spec.tensors(), sources, strict=True))
        whole = spec.layout.unpack(tensors, spec.format, spec.shape[-2:], spec.parts)
        if spec.stack:
            order = spec.stack.order
            one = QTensor(spec.format, whole.codes[order], None if whole.scales is None else whole.scales[order])
            named = {f"{spec.stack.name}_{suffix}": tensor for suffix, tensor in self.layout.pack(one).items()}
            if spec.bias_dtype is not None:
                named[f"{spec.stack.name}_bias"] = tensors["bias"][order].to(spec.bias_dtype)
            return named
        rows = spec.source_rows
        result: dict[str, torch.Tensor] = {}
        for name, part in zip(self.names, split_rows(whole, rows), strict=True):
            result.update({f"{name}.{suffix}": tensor for suffix, tensor in self.layout.pack(part).items()})
        if spec.bias_dtype is not None:
            for name, bias in zip(self.names, tensors["bias"].split(rows), strict=True):
                result[f"{name}.bias"] = bias.to(spec.bias_dtype)
        return result


def read_codes(matrix: Matrix, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor:
    """The stored matrix with its codes unchanged, or rounded to the format without scales that kernels read."""
    q = matrix.codes(tensors)
    if q is None:
        assert not fmt.has_scales, "the planner asked for a format that the decoder does not give"
        return QTensor(fmt, fmt.encode(matrix.values(tensors)))
    if q.scales is not None and not all_finite(q.scales):  # a byte of E8M0 shows it only once it is read
        place = (~torch.isfinite(q.scales)).nonzero()[0].tolist()
        hint = "the source is damaged; fetch it or convert it again"
        raise SchemeError(f"{matrix.module}: scale {place} is not finite", hint=hint)
    return q
