"""The computations of packing and unpacking: pure, picklable, the same bytes wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import BF16, WeightFormat
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

from ..sources.base import Reader, first_bad
from .cuts import Share


@dataclass(frozen=True)
class PackedPart:
    """Matrices of equal shape that become one packed matrix, one under the other.

    Attributes:
        output: Name of the packed module.
        layout: Its layout.
        format: What its codes mean; the readers give codes of it unchanged.
        readers: Reads the matrix of each part.
        counts: How many tensors each reader takes.
        biases: Whether the bias of each part follows its tensors.
        share: Which share of each matrix is packed.
    """

    output: str
    layout: Layout
    format: WeightFormat
    readers: tuple[Reader, ...]
    counts: tuple[int, ...]
    biases: bool = False
    share: Share = Share()

    @property
    def count(self) -> int:
        """How many stored tensors `pack` takes."""
        return sum(self.counts) + self.biases * len(self.counts)

    def pack(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The packed tensors by full name.

        Raises:
            SchemeError: A scale is NaN or infinite.
        """
        remaining = iter(tensors)
        parts = []
        biases = []
        for reader, count in zip(self.readers, self.counts, strict=True):
            whole = read_codes(reader, [next(remaining) for _ in range(count)], self.format)
            _check_scales(whole, self.output)
            parts.append(self.share.take(whole))
            if self.biases:
                biases.append(self.share.take_bias(next(remaining)).to(torch.float32))
        named = {f"{self.output}.{suffix}": tensor for suffix, tensor in self.layout.pack(join_parts(parts)).items()}
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
        """The packed tensors by name."""
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
        shape = spec.shape[-2:]
        tensors = dict(zip(spec.tensors(), sources, strict=True))
        whole = spec.layout.unpack(tensors, spec.format, shape, spec.parts)
        result: dict[str, torch.Tensor] = {}
        for number, (name, part) in enumerate(zip(self.names, split_parts(whole), strict=True)):
            result.update({f"{name}.{suffix}": tensor for suffix, tensor in self.layout.pack(part).items()})
            if spec.bias_dtype is not None:
                result[f"{name}.bias"] = tensors["bias"].chunk(spec.parts)[number].to(spec.bias_dtype)
        return result


def read_codes(reader: Reader, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor:
    """The stored matrix with its codes unchanged; a float16 matrix is rounded to bf16."""
    if fmt is BF16 and tensors[0].dtype == torch.float16:
        return QTensor(fmt, tensors[0].to(torch.bfloat16))
    q = reader.codes(tensors, fmt)
    assert q is not None, "the planner asked for a format that the reader does not keep"
    return q


def _check_scales(q: QTensor, subject: str) -> None:
    """A scale that is NaN or infinite spoils its whole block; codes are not searched, which would cost a pass."""
    if q.scales is not None and not torch.isfinite(q.scales.to(torch.float32)).all():
        _, index, value = first_bad([q.scales]) or (0, [], 0.0)
        raise SchemeError(
            f"{subject}: scale {index} is {value}; only finite scales can be packed",
            hint="the source is damaged; fetch it or convert it again",
        )


def join_parts(parts: Sequence[QTensor]) -> QTensor:
    """Weights of equal shape and format as the equal parts of one weight, one under the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all(part.format == first.format and part.shape == first.shape for part in parts)
    scales = [part.scales for part in parts if part.scales is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    assert len(zeros) in {0, len(parts)}, "parts with and without zero points"
    bits = [part.codes.view(torch.uint8) if part.codes.itemsize == 1 else part.codes for part in parts]
    return QTensor(
        first.format,
        torch.cat(bits).view(first.codes.dtype),
        torch.cat(scales) if scales else None,
        torch.cat(zeros) if zeros else None,
        len(parts),
    )


def split_parts(q: QTensor) -> list[QTensor]:
    """The inverse of `join_parts`."""

    def split(tensor: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        return [None] * q.parts if tensor is None else tensor.chunk(q.parts, -2)

    parts = zip(split(q.codes), split(q.scales), split(q.zeros), strict=True)
    return [QTensor(q.format, codes, scales, zeros) for codes, scales, zeros in parts if codes is not None]
