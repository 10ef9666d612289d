"""What all integer formats share: an even grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import WeightFormat

BARS = 32  # of a histogram, at most

# Integers gain from clipping the tail of a block and, with one more code below 0 than above, from aiming a negative
# maximum at it: fractions beyond 1.
FRACTIONS = tuple(1.0 - step / 32 for step in range(-2, 14))


@dataclass(frozen=True)
class IntegerFormat(WeightFormat):
    """Integers, two's complement where `zero_point` is 0, else unsigned around it."""

    fractions: tuple[float, ...] = FRACTIONS

    def nearest(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.nearest`; two's complement stops at -qmax, so that it stays symmetric."""
        lowest = -self.zero_point if self.zero_point else -self.qmax
        return steps.round().clamp(lowest, self.qmax)

    def half_step(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.half_step`: 1/2 everywhere."""
        return torch.full_like(steps, 0.5)

    def bars(self, counts: torch.Tensor) -> tuple[list[str], list[int]]:
        """See `WeightFormat.bars`: a bar for each value, or for equally many neighbours, called by the first."""
        lowest, values = -(1 << (self.bits - 1)), 1 << self.bits
        ascending = counts.roll(-(lowest + self.zero_point))[:values]
        width = max(values // BARS, 1)
        labels = [str(lowest + first) for first in range(0, values, width)]
        return labels, ascending.reshape(-1, width).sum(-1).tolist()
