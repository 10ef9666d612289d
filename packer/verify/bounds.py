"""How far a quantized weight may lie from its source: bounds per block of scales, derived from the source alone.

The bound must not trust the candidate's own scales: a doubled scale would double it. So the scale of every block is the
one that the format's own rule gives for the source, `s = amax / qmax` (its power of two for MXFP4). Two limits follow:

- *worst case*: rounding to the nearest code is off by at most `WeightFormat.half_step`: `s / 2` for integers,
  `max(|w| / 16, s * 2^-10)` for e4m3 (half a step of 3 mantissa bits, or half of the smallest subnormal). No such
  quantizer exceeds the root of the summed squares.
- *likely*: errors spread evenly over that interval have a mean square of a third of its square, with a standard
  deviation of sqrt(4 / 45) of it per element; seven deviations above the mean do not happen by chance.

A block may be off by the likely error, or, if that is more, by what rounding to the nearest code (sources that lie on
a coarse grid) and then the scale to bf16 really gives on it. docs/accuracy.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.ops import convert

MEAN_SQUARE = 1 / 3  # of an error spread evenly over [-1, 1]
DEVIATION = (4 / 45) ** 0.5  # standard deviation of that square
DEVIATIONS = 7.0
SLACK = 1.1  # of the root of two summed squares, for errors that are not quite independent
BF16_SCALE = 2.0**-8  # largest share by which rounding to bf16 changes a scale, and so every value of its block
RUN = 1 << 20  # elements of a weight that are judged at once


def row_runs(n: int, k: int, fmt: WeightFormat) -> Iterator[slice]:
    """Cut the rows of a weight [N, K] into runs of whole blocks, so that temporaries in fp64 stay small."""
    unit = fmt.block_n or 1
    step = max(RUN // max(k, 1) // unit, 1) * unit
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def block_view(values: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Values `[N, K]` as `[scale rows, block_n, scale columns, block_k]`, edge blocks filled up with zeros."""
    n, k = values.shape
    block_n, block_k = fmt.block_n or n, fmt.block_k or k
    padded = F.pad(values, (0, -k % block_k, 0, -n % block_n))
    return padded.reshape(padded.shape[0] // block_n, block_n, padded.shape[1] // block_k, block_k)


def block_norms(values: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Euclidean norm of each block of scales of `values` `[N, K]`: float64 `[scale rows, scale columns]`."""
    return block_view(values, fmt).to(torch.float64).square().sum((1, 3)).sqrt()


def ideal_scales(reference: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """What the format's own rule gives for the source: fp32 [scale rows, scale columns], above zero."""
    if reference.dtype in convert.READ:
        amax = convert.block_amax(reference, fmt)
    else:
        amax = block_view(reference.to(torch.float32), fmt).abs().amax((1, 3))
    return fmt.ideal_scales(amax)


def allowed_error(norm: torch.Tensor, worst: torch.Tensor, nearest: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Largest Euclidean error of each block that still counts as sound: float64, in the unit of the weights.

    Args:
        norm: Sum of the squares of the source, per block.
        worst: Sum of the squares of half a step.
        nearest: Sum of the squared errors of the nearest codes.
        count: Numbers in the block.
    """
    share = MEAN_SQUARE + DEVIATIONS * DEVIATION / count.sqrt()
    norms = norm.sqrt()
    allowed = torch.maximum(
        worst.sqrt() * share.clamp_max(1).sqrt(), SLACK * torch.hypot(nearest.sqrt(), BF16_SCALE * norms)
    )
    rounding = 2.0**-22 * norms  # of code * scale in fp32
    return torch.where(norm == 0, torch.zeros_like(allowed), allowed + rounding)


def allowed_rounding(reference: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """The same for a format without scales, whose one block is the matrix: float64 [1, 1].

    Half a step is allowed, which is nothing if the source, fp32 [N, K], is on the grid itself.
    """
    exact = bool((fmt.nearest(reference) == reference).all())
    return block_norms(torch.zeros_like(reference) if exact else fmt.half_step(reference), fmt)
