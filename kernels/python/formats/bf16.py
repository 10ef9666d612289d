"""bf16, the format of weights that are not quantized: codes are the values, without scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import WeightFormat

HALF_STEP = 2.0**-8  # half a step of 7 stored mantissa bits, relative to the smallest value of a binade


@dataclass(frozen=True)
class Bf16(WeightFormat):
    """bf16 values."""

    def nearest(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.nearest`."""
        return self.encode(steps).to(torch.float32)

    def encode(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.encode`."""
        return steps.to(self.code_dtype)

    def half_step(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.half_step`."""
        return steps.abs() * HALF_STEP

    def bars(self, counts: torch.Tensor) -> tuple[list[str], list[int]]:
        """See `WeightFormat.bars`: none, as one byte of a value says little."""
        return [], []


BF16 = Bf16("bf16", 16, torch.bfloat16)
