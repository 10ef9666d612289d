"""The types that a weight passes through: specification, layout-free codes, refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .formats import WeightFormat


@dataclass(frozen=True)
class TensorSpec:
    """Data type and shape of a tensor that need not exist yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The specification that `tensor` meets."""
        return TensorSpec(tensor.dtype, tuple(tensor.shape))


@dataclass(frozen=True)
class Reject:
    """Why something is refused: never a bare False.

    Attributes:
        name: The tensor, file or module in question.
        reason: Fact with value and rule, as a clause without a final period.
        hint: The way out, or None.
    """

    name: str
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class QTensor:
    """A quantized weight without a layout: the hub between schemes and layouts.

    Attributes:
        format: What the numbers mean.
        codes: `format.code_dtype` [N, K], or [E, N, K] for a stack of experts; contiguous, one element per code.
        scales: fp32 [.., scale_rows, scale_columns] multipliers (> 0), or None for 16-bit formats.
        zeros: uint8 [.., N, K / block_k] zero points of asymmetric codes; None means `format.zero_point` everywhere.
        parts: The rows are this many equal parts one after the other (gate and up: 2), each with a scale grid that
            starts anew, so that no block of scales spans two of them.
    """

    format: WeightFormat
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    parts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [N, K] or [E, N, K]."""
        return tuple(self.codes.shape)

    def dequantize(self) -> torch.Tensor:
        """The values that the codes stand for: fp32 [.., N, K], `(code - zero) * scale` in fp32."""
        fmt = self.format
        steps = fmt.decode(self.codes, self.zeros)
        if self.scales is None:
            return steps
        *_, n, k = self.shape
        rows_per_part = n // self.parts
        rows = torch.arange(n) % rows_per_part // fmt.block_n
        rows = rows + torch.arange(n) // rows_per_part * (fmt.scale_rows(n, self.parts) // self.parts)
        scales = self.scales.index_select(-2, rows).repeat_interleave(fmt.block_k or k, -1)[..., :k]
        return steps * scales
