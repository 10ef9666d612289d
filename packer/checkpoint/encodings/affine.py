"""Integer codes with scales and zero points for groups of columns, however they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import INT4_BY_GROUP, WeightFormat
from tilewright.kernels.tensors import QTensor

from ..encoding import Decoder


@dataclass(frozen=True)
class AffineDecoder(Decoder):
    """value[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] in fp32, g the group of column k.

    Attributes:
        bits: Bits of a code.
        k: Columns.
        group: Columns that share a scale; 0 for all of them.
        middle: Zero point of symmetric codes.
    """

    bits: int
    k: int
    group: int
    middle: int

    def unpack(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Unsigned codes of some rows: uint8 [rows, K]."""
        raise NotImplementedError

    def scales(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Scales of some rows: [rows, groups]."""
        raise NotImplementedError

    def zeros(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor | None:
        """Zero points of some rows: uint8 [rows, groups]; None if all of them are `middle`."""
        return None

    def groups(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Group of each column: int64 [K]."""
        return torch.arange(self.k) // (self.group or self.k)

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        codes, index = self.unpack(tensors, rows).to(torch.float32), self.groups(tensors)
        zeros = self.zeros(tensors, rows)
        codes -= self.middle if zeros is None else zeros.to(torch.float32)[:, index]
        return codes.mul_(self.scales(tensors, rows).to(torch.float32)[:, index])

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`.

        Raises:
            SchemeError: The groups of columns do not follow one another.
        """
        if not torch.equal(self.groups(tensors), torch.arange(self.k) // self.group):
            hint = "quantize-model reads it: it quantizes the weights a second time"
            raise SchemeError("columns were grouped in the order of activations, no kernel runs that", hint=hint)
        everything = slice(0, self.height(tensors), 1)
        codes, zeros = self.unpack(tensors, everything), self.zeros(tensors, everything)
        scales = self.scales(tensors, everything).to(torch.float32)
        if zeros is not None:
            zeros = None if bool((zeros == fmt.zero_point).all()) else zeros.contiguous()
        return QTensor(fmt, codes.contiguous(), scales.contiguous(), zeros)

    def height(self, tensors: Sequence[torch.Tensor]) -> int:
        """Rows of the matrix."""
        raise NotImplementedError


def int4_format(bits: int, group: int, shape: tuple[int, int], by_activation: bool) -> str:
    """Id of the weight format that holds such codes as they are; empty if none does."""
    fits = bits == 4 and group in INT4_BY_GROUP and shape[0] % 8 == 0 and shape[1] % group == 0 and not by_activation
    return INT4_BY_GROUP[group].id if fits else ""


def layout_id(stem: str, scale_dtype: torch.dtype) -> str:
    """Id of the checkpoint layout of this stem with scales of this type."""
    return stem + {torch.float16: "", torch.bfloat16: "-bf16", torch.float32: "-fp32"}[scale_dtype]
