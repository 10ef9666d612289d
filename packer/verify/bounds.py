"""How far a quantized weight may lie from its source: bounds per block of scales, derived from the source alone.

The bound must not trust the candidate's own scales: a doubled scale would double it. So the scale of every block is the
one that the format's own rule gives for the source, `s = amax / qmax`, and two limits follow from it:

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

MEAN_SQUARE = 1 / 3  # of an error spread evenly over [-1, 1]
DEVIATION = (4 / 45) ** 0.5  # standard deviation of that square
DEVIATIONS = 7.0
SLACK = 1.1  # of the root of two summed squares, for errors that are not quite independent
BF16_SCALE = 2.0**-8  # largest share by which rounding to bf16 changes a scale, and so every value of its block
RUN = 1 << 20  # elements of a weight that are judged at once
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


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


def _scales(blocks: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    amax = blocks.abs().amax((1, 3), keepdim=True)
    return (amax / fmt.qmax).clamp_min(SMALLEST_SCALE)


def _nearest(blocks: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    return fmt.nearest((blocks / scales).clamp(-fmt.qmax, fmt.qmax)) * scales


def allowed_error(reference: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Largest Euclidean error of each block that still counts as sound.

    Args:
        reference: Source values, fp32 `[N, K]`.
        fmt: Format of the candidate.

    Returns:
        float64 `[scale rows, scale columns]`, in the unit of the weights. For 16-bit formats one block is the whole
        matrix, and half a step is allowed, which is nothing if the source is bf16 itself.
    """
    if not fmt.has_scales:
        exact = bool((fmt.nearest(reference) == reference).all())
        return block_norms(torch.zeros_like(reference) if exact else fmt.half_step(reference), fmt)
    blocks = block_view(reference, fmt)
    scales = _scales(blocks, fmt)
    elements = fmt.half_step(blocks / scales) * scales
    inside = block_view(torch.ones_like(reference), fmt).to(torch.float64)
    worst = (elements * inside).square().sum((1, 3)).sqrt()
    share = MEAN_SQUARE + DEVIATIONS * DEVIATION / inside.sum((1, 3)).sqrt()
    norms = blocks.to(torch.float64).square().sum((1, 3)).sqrt()
    nearest = (_nearest(blocks, scales, fmt) - blocks).to(torch.float64).square().sum((1, 3)).sqrt()
    allowed = torch.maximum(worst * share.clamp_max(1).sqrt(), SLACK * torch.hypot(nearest, BF16_SCALE * norms))
    rounding = 2.0**-22 * norms  # of code * scale in fp32
    return torch.where(blocks.abs().amax((1, 3)) == 0, torch.zeros_like(allowed), allowed + rounding)
