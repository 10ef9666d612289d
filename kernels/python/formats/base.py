"""What a number format is: the codes of a quantized weight, and all arithmetic that depends on what they mean.

A `WeightFormat` is the meeting point of schemes (which choose numbers) and layouts (which choose bytes). Nothing
outside this folder, the layouts and the kernels asks for its dtype or its bits: whoever quantizes, verifies or counts
asks the format itself, so that a new one is one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

COARSE_BITS = 4
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny  # also the smallest normal bf16


@dataclass(frozen=True)
class WeightFormat(ABC):
    """Number format of a weight `[N, K]`: one code per element, one scale per block.

    value[n, k] = (code[n, k] - zero[n, k // block_k]) * scale[n // block_n, k // block_k]

    A *step* is a value in units of its scale; the grid are the steps that codes stand for.

    Attributes:
        id: Stable name, written into packed files.
        bits: Bits per code on disk.
        code_dtype: torch dtype of `QTensor.codes` (one element per code, also for 4 bits).
        qmax: Largest step that a symmetric quantizer aims the block maximum at; 0 for formats without scales.
        block_n: Rows that share a scale; 0 for formats without scales.
        block_k: Columns that share a scale; 0 means the whole row.
        zero_point: Code of the value 0; codes are unsigned around it where it is not 0.
        scale_dtype: What readers store or cast the scales to; codes are made with scales rounded to it.
        native: Name under which the native operators of conversion know the grid; None where they do not.
        fractions: Shares of a block's largest magnitude that are worth trying as what `qmax` stands for.
    """

    id: str
    bits: int
    code_dtype: torch.dtype
    qmax: float = 0.0
    block_n: int = 0
    block_k: int = 0
    zero_point: int = 0
    scale_dtype: torch.dtype = torch.float32
    native: str | None = None
    fractions: tuple[float, ...] = ()

    @abstractmethod
    def nearest(self, steps: torch.Tensor) -> torch.Tensor:
        """The step on the grid nearest to each of `steps`, ties to even, cut off at its ends: fp32 of fp32."""

    @abstractmethod
    def half_step(self, steps: torch.Tensor) -> torch.Tensor:
        """How far the grid's nearest step lies at most from each of `steps` within its ends: fp32 of fp32."""

    @abstractmethod
    def bars(self, counts: torch.Tensor) -> tuple[list[str], list[int]]:
        """A histogram of codes: labels and counts of its bars, ascending by value.

        Args:
            counts: int64 [256], how often each byte occurs as a code.
        """

    def encode(self, steps: torch.Tensor) -> torch.Tensor:
        """Codes, in `code_dtype`, of the nearest steps on the grid; `steps` are fp32 (or 16-bit without scales)."""
        return (self.nearest(steps) + self.zero_point).to(self.code_dtype)

    def decode(self, codes: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
        """Steps that codes stand for, fp32.

        Args:
            codes: `code_dtype` [.., N, K].
            zeros: uint8 [.., N, ceil(K / block_k)] zero points in place of `zero_point`.
        """
        steps = codes.to(torch.float32)
        if zeros is not None:
            spread = zeros.to(torch.float32).repeat_interleave(self.block_k or codes.shape[-1], -1)
            return steps - spread[..., : codes.shape[-1]]
        return steps - self.zero_point if self.zero_point else steps

    def scales(self, amax: torch.Tensor, fraction: float = 1.0) -> torch.Tensor:
        """`amax / qmax * fraction`, in `scale_dtype`, at least the smallest normal number, and 1 where amax is 0.

        Args:
            amax: fp32 [scale_rows, scale_columns], finite: the largest magnitude of each block.
            fraction: Share of the largest magnitude that the largest code stands for.

        Returns:
            fp32 [scale_rows, scale_columns], finite and > 0.
        """
        # A tensor, since CUDA divides by a number by multiplying with its reciprocal, which is another scale.
        qmax = torch.full((), self.qmax, device=amax.device)
        scales = (amax / qmax * fraction).to(self.scale_dtype).to(torch.float32).clamp_min(SMALLEST_NORMAL)
        return torch.where(amax == 0, 1.0, scales)

    def ideal_scales(self, amax: torch.Tensor) -> torch.Tensor:
        """Scales by which errors are judged: `amax / qmax` before it is rounded to `scale_dtype`, fp32, above zero."""
        return (amax / self.qmax).clamp_min(SMALLEST_NORMAL)

    def has_usual_zeros(self, zeros: torch.Tensor | None) -> bool:
        """Whether zero points are `zero_point` everywhere, so that nothing is lost without them."""
        return zeros is None or bool((zeros == self.zero_point).all())

    @property
    def has_scales(self) -> bool:
        """Whether codes need scales to become values."""
        return self.block_n > 0

    @property
    def is_coarse(self) -> bool:
        """Whether its steps are so few that quantizing such a weight a second time is worth a warning."""
        return self.bits <= COARSE_BITS

    def scale_rows(self, n: int, parts: int = 1) -> int:
        """Number of scale rows of a weight of `n` rows made of `parts` equal parts, each with a grid of its own."""
        assert n % parts == 0
        return parts * -(-(n // parts) // self.block_n)

    def scale_columns(self, k: int) -> int:
        """Number of scale columns of a weight of `k` columns."""
        return -(-k // self.block_k) if self.block_k else 1
