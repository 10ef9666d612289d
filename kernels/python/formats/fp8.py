"""FP8 E4M3 in blocks of 128 x 128: sign, 4 bits of exponent, 3 of mantissa; no infinity, largest value 448."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import WeightFormat

HALF_STEP = 2.0**-4  # half a step of 3 mantissa bits, relative to the value
HALF_SUBNORMAL = 2.0**-10  # half of the smallest subnormal
SMALLEST_EXPONENT, LARGEST_EXPONENT = -6, 8  # of normal numbers


@dataclass(frozen=True)
class E4M3(WeightFormat):
    """FP8 E4M3 (torch's `float8_e4m3fn`) with one scale per block.

    Its grid is nearly the same at every scale, so few fractions are worth a try.
    """

    fractions: tuple[float, ...] = tuple(1.0 - step / 16 for step in range(8))

    def nearest(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.nearest`."""
        return self.encode(steps).to(torch.float32)

    def encode(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.encode`."""
        return steps.clamp(-self.qmax, self.qmax).to(self.code_dtype)

    def half_step(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.half_step`: a share of the value, but not below half of the smallest subnormal."""
        return (steps.abs() * HALF_STEP).clamp_min(HALF_SUBNORMAL)

    def bars(self, counts: torch.Tensor) -> tuple[list[str], list[int]]:
        """See `WeightFormat.bars`: one bar for each sign and exponent."""
        exponents = counts.reshape(2, 16, 8).sum(-1)  # sign, exponent, mantissa
        normal = (f"2^{exponent}" for exponent in range(SMALLEST_EXPONENT, LARGEST_EXPONENT + 1))
        names = [f"< 2^{SMALLEST_EXPONENT}", *normal]
        labels = [f"-{name}" for name in reversed(names)] + names
        return labels, exponents[1].flip(0).tolist() + exponents[0].tolist()


FP8 = E4M3("fp8", 8, torch.float8_e4m3fn, qmax=448.0, block_n=128, block_k=128, native="fp8")
