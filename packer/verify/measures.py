"""What is measured of a quantized weight beside its source, block of scales by block, in one pass over both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.ops import convert
from tilewright.kernels.tensors import QTensor

from .bounds import BF16_SCALE, block_view, ideal_scales, row_runs

NATIVE = (torch.float32, torch.bfloat16, torch.float16)  # sources that the native operator reads


@dataclass(frozen=True)
class BlockMeasures:
    """Grids [scale rows, scale columns] of figures, float64.

    `ideal` is the scale that the format's own rule gives for the source, `amax / qmax`; a *step* is a value in units of
    a scale, *half* the half distance between neighbours on the format's grid around it.

    Attributes:
        error: Sum of (code * scale - source)^2.
        norm: Sum of source^2.
        worst: Sum of (half * ideal)^2 around source / ideal.
        nearest: Sum of (nearest(source / ideal) * ideal - source)^2.
        outside: How many numbers lie further than half a step from their code, less those that are cut off at the
            format's largest code and those that a scale rounded to bf16 explains.
        largest: Largest |code * scale - source|.
        code: Largest magnitude of a code, 0 if the block is all zeros.
        count: Numbers in the block.
    """

    error: torch.Tensor
    norm: torch.Tensor
    worst: torch.Tensor
    nearest: torch.Tensor
    outside: torch.Tensor
    largest: torch.Tensor
    code: torch.Tensor
    count: torch.Tensor


def measure(reference: torch.Tensor, q: QTensor) -> BlockMeasures:
    """Measure a weight in a format with scales.

    Args:
        reference: Source values [N, K], fp32 or 16 bits.
        q: The candidate [N, K].
    """
    assert q.scales is not None
    if q.format.native and q.format.has_usual_zeros(q.zeros) and reference.dtype in NATIVE:
        grids = convert.code_errors(reference, q.codes, q.scales, ideal_scales(reference, q.format), q.format)
    else:
        grids = measure_formula(reference, q)
    error, norm, worst, nearest, outside, largest, code = grids.unbind(-1)
    return BlockMeasures(error, norm, worst, nearest, outside, largest, code, _counts(reference.shape, q))


def measure_formula(reference: torch.Tensor, q: QTensor) -> torch.Tensor:
    """What `convert.code_errors` computes: float64 [scale rows, scale columns, 7], some rows at a time."""
    assert q.scales is not None
    runs = []
    for rows in row_runs(len(reference), reference.shape[1], q.format):
        grid = slice(rows.start // q.format.block_n, -(-rows.stop // q.format.block_n))
        zeros = None if q.zeros is None else q.zeros[rows]
        runs.append(_run(reference[rows].to(torch.float32), QTensor(q.format, q.codes[rows], q.scales[grid], zeros)))
    return torch.cat(runs)


def _run(reference: torch.Tensor, q: QTensor) -> torch.Tensor:
    assert q.scales is not None
    fmt = q.format
    weights = block_view(reference, fmt)
    codes = block_view(fmt.decode(q.codes, q.zeros), fmt)
    inside = block_view(torch.ones_like(reference), fmt)
    scales = q.scales[:, None, :, None]
    difference = (codes * scales - weights) * inside  # padded codes and scales of NaN stay out
    difference = torch.where(inside == 0, torch.zeros_like(difference), difference)
    steps, ideal = weights / scales, ideal_scales(reference, fmt)[:, None, :, None]
    half = fmt.half_step(steps)
    outside = (steps - codes).abs() > half + (codes.abs() + half) * BF16_SCALE
    outside &= ~((codes.abs() >= fmt.qmax) & (steps.abs() >= codes.abs()) & (steps.sign() == codes.sign()))
    nearest = fmt.nearest((weights / ideal).clamp(-fmt.qmax, fmt.qmax)) * ideal - weights
    worst = fmt.half_step(weights / ideal) * ideal * inside
    squares = (difference, weights, worst, nearest)
    sums = [values.to(torch.float64).square().sum((1, 3)) for values in squares]
    counted = (outside & (inside > 0)).sum((1, 3)).to(torch.float64)
    largest = [values.abs().amax((1, 3)).to(torch.float64) for values in (difference, codes * inside)]
    return torch.stack([*sums, counted, *largest], -1)


def _counts(shape: torch.Size, q: QTensor) -> torch.Tensor:
    """Numbers in each block; those at the edges have fewer."""
    n, k = shape
    block_n, block_k = q.format.block_n or n, q.format.block_k or k
    rows, columns = torch.arange(0, n, block_n), torch.arange(0, k, block_k)
    heights, widths = (n - rows).clamp_max(block_n), (k - columns).clamp_max(block_k)
    return (heights[:, None] * widths).to(torch.float64)
