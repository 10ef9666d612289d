"""Blocks whose codes do not belong to their scale, found as the odd ones out.

A bound on the error cannot see a wrong scale that is close to the right one: two swapped rows of int4 scales that
differ by 5% add less error than the rounding itself. But they leave a mark: where codes were rounded to the nearest,
every source value lies within half a step of its code, and under a wrong scale some do not. So in a tensor most of
whose blocks keep that rule, a block that breaks it was damaged. Where most blocks break it, the codes were chosen on
purpose otherwise (error feedback), and the rule says nothing.
"""

from __future__ import annotations

import torch

from tilewright.kernels.tensors import QTensor

from .bounds import BF16_SCALE, block_view, row_runs

FEWEST = 2  # elements out of line that make a block a stray: one may be a tie that was broken otherwise
SHARE = 0.01


def stray_blocks(reference: torch.Tensor, q: QTensor) -> torch.Tensor:
    """Which blocks of scales break the rule that the others keep: bool [scale rows, scale columns].

    Args:
        reference: Source values, fp32 [N, K].
        q: The candidate, with scales.
    """
    assert q.scales is not None
    runs = [_count(reference[rows], _rows(q, rows)) for rows in row_runs(len(reference), reference.shape[1], q.format)]
    counts, sizes, used = (torch.cat(grids) for grids in zip(*runs, strict=True))
    if counts[used].eq(0).sum() * 2 <= used.sum():
        return torch.zeros_like(used)
    return counts >= (sizes * SHARE).clamp_min(FEWEST)


def _count(reference: torch.Tensor, q: QTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each block: elements further than half a step from their code, elements, whether any code is not 0."""
    assert q.scales is not None
    codes = q.format.decode(q.codes, q.zeros)
    blocks = block_view(codes, q.format)
    steps = block_view(reference, q.format) / q.scales[:, None, :, None]
    half = q.format.half_step(steps)
    outside = (steps - blocks).abs() > half + (blocks.abs() + half) * BF16_SCALE
    outside &= ~((blocks.abs() >= q.format.qmax) & (steps.abs() >= blocks.abs()) & (steps.sign() == blocks.sign()))
    sizes = block_view(torch.ones_like(codes), q.format).sum((1, 3))
    return outside.sum((1, 3)), sizes, (blocks != 0).any(3).any(1)


def _rows(q: QTensor, rows: slice) -> QTensor:
    """Some rows of a matrix, whole blocks of scales."""
    assert q.scales is not None
    grid = slice(rows.start // q.format.block_n, -(-rows.stop // q.format.block_n))
    return QTensor(q.format, q.codes[rows], q.scales[grid], None if q.zeros is None else q.zeros[rows])
