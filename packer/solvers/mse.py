"""Least squares: the positive scale that minimises the squared error of a block, without data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.ops import convert

from .blocks import block_view, expand, scales_from_amax


def halving_sum(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum along `dim` in one fixed order: the upper half is added onto the lower half until one element is left.

    An odd length is filled up with a zero. Any implementation that follows this order gives the same bits, whereas the
    order of `torch.sum` is nobody's promise.
    """
    while (length := values.shape[dim]) > 1:
        half = (length + 1) // 2
        lower, upper = values.narrow(dim, 0, half), values.narrow(dim, half, length - half)
        if length % 2:
            upper = torch.cat((upper, torch.zeros_like(lower.narrow(dim, 0, 1))), dim)
        values = lower + upper
    return values.squeeze(dim)


def squared_error(weight: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Sum over each block of `(round(w / s) * s - w)^2`, fp32 [scale_rows, scale_columns]; K first, then rows."""
    if fmt.native and weight.device.type == "cpu":
        return convert.squared_error(weight, scales, fmt)
    return squared_error_formula(weight, scales, fmt)


def squared_error_formula(weight: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """What `squared_error` computes."""
    spread = expand(scales, fmt, *weight.shape)
    error = fmt.nearest(weight / spread).mul_(spread).sub_(weight)
    return halving_sum(halving_sum(block_view(error.square_(), fmt), 3), 1)


@dataclass(frozen=True)
class LeastSquares:
    """The best of the scales `amax / qmax * fraction` for the format's fractions.

    Of equals the first is taken, beginning with fraction 1.

    Fraction 1 is what rounding to nearest takes, so the error is never larger than there.
    """

    id: str = "mse"

    def scales(self, weight: torch.Tensor, amax: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
        """See `Solver.scales`."""
        best = scales_from_amax(amax, fmt)
        least = squared_error(weight, best, fmt)
        for fraction in fmt.fractions:
            scales = scales_from_amax(amax, fmt, fraction)
            error = squared_error(weight, scales, fmt)
            better = error < least
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
        return best
