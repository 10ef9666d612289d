"""The computations of packing and unpacking: pure, picklable, the same bytes wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import BF16, WeightFormat
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

from ..checkpoint.base import Reader, first_bad
from ..plan import NotFiniteError
from .cuts import Share


@dataclass(frozen=True)
class PackedPart:
    """Matrices that become one packed matrix, one under the other.

    Attributes:
        output: Name of the packed module.
        layout: Its layout.
        format: What its codes mean; the readers give codes of it unchanged.
        readers: Reads the matrix of each part.
        counts: How many tensors each reader takes.
        rows: Which rows of what each reader gives are packed, and of the bias.
        biases: Whether the bias of each part follows its tensors.
        share: Which share of each matrix is packed.
        parts: Equal parts of the packed rows that are padded and scaled each on its own.
    """

    output: str
    layout: Layout
    format: WeightFormat
    readers: tuple[Reader, ...]
    counts: tuple[int, ...]
    rows: tuple[slice, ...]
    biases: bool = False
    share: Share = Share()
    parts: int = 1

    @property
    def count(self) -> int:
        """How many stored tensors `pack` takes."""
        return sum(self.counts) + self.biases * len(self.counts)

    def pack(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The packed tensors by full name."""
        remaining = iter(tensors)
        parts = []
        biases = []
        for reader, count, rows in zip(self.readers, self.counts, self.rows, strict=True):
            whole = read_codes(reader, [next(remaining) for _ in range(count)], self.format)
            parts.append(self.share.take(_some_rows(whole, rows)))
            if self.biases:
                biases.append(self.share.take_bias(next(remaining)[rows]).to(torch.float32))
        named = {
            f"{self.output}.{suffix}": tensor
            for suffix, tensor in self.layout.pack(join_rows(parts, self.parts)).items()
        }
        if self.biases:
            named[f"{self.output}.bias"] = torch.cat(biases)
        return named


@dataclass(frozen=True)
class PackStep:
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
class UnpackStep:
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
        rows = spec.source_rows
        result: dict[str, torch.Tensor] = {}
        for name, part in zip(self.names, split_rows(whole, rows), strict=True):
            result.update({f"{name}.{suffix}": tensor for suffix, tensor in self.layout.pack(part).items()})
        if spec.bias_dtype is not None:
            for name, bias in zip(self.names, tensors["bias"].split(rows), strict=True):
                result[f"{name}.bias"] = bias.to(spec.bias_dtype)
        return result


def read_codes(reader: Reader, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor:
    """The stored matrix with its codes unchanged; a float16 matrix is rounded to bf16."""
    if fmt is BF16 and tensors[0].dtype == torch.float16:
        return QTensor(fmt, reader.raw(tensors, slice(None)).to(torch.bfloat16))
    q = reader.codes(tensors, fmt)
    assert q is not None, "the planner asked for a format that the reader does not keep"
    return q


def _some_rows(q: QTensor, rows: slice) -> QTensor:
    if rows == slice(None):
        return q
    assert q.scales is None, "stacks of quantized experts are not taken apart"
    return QTensor(q.format, q.codes[rows])


def join_rows(weights: Sequence[QTensor], parts: int) -> QTensor:
    """Weights of one format and K as one weight, one under the other.

    Args:
        weights: Each with its own grid of scales; with `parts` 1 and more than one of them, of whole blocks of rows.
        parts: 1, or their number if they are equally large and stay parts.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    assert parts in {1, len(weights)}
    assert all(weight.format == first.format for weight in weights)
    scales = [weight.scales for weight in weights if weight.scales is not None]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    assert len(zeros) in {0, len(weights)}, "parts with and without zero points"
    bits = [weight.codes.view(torch.uint8) if weight.codes.itemsize == 1 else weight.codes for weight in weights]
    return QTensor(
        first.format,
        torch.cat(bits).view(first.codes.dtype),
        torch.cat(scales) if scales else None,
        torch.cat(zeros) if zeros else None,
        parts,
    )


def split_rows(q: QTensor, rows: Sequence[int]) -> list[QTensor]:
    """The inverse of `join_rows`; `rows` are those of each weight."""

    def split(tensor: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
        return [None] * len(rows) if tensor is None else tensor.split(list(sizes), -2)

    grid = [q.format.scale_rows(n) for n in rows] if q.format.has_scales else rows
    split_up = zip(split(q.codes, rows), split(q.scales, grid), split(q.zeros, grid), strict=True)
    return [QTensor(q.format, codes, scales, zeros) for codes, scales, zeros in split_up if codes is not None]
