"""Blocks whose codes do not belong to their scale, found as the odd ones out.

A bound on the error cannot see a wrong scale that is close to the right one: two swapped rows of int4 scales that
differ by 5% add less error than the rounding itself. But they leave a mark: where codes were rounded to the nearest,
every source value lies within half a step of its code, and under a wrong scale some do not. So in a tensor most of
whose blocks keep that rule, a block that breaks it was damaged. Where most blocks break it, the codes were chosen on
purpose otherwise (error feedback), and the rule says nothing.
"""

from __future__ import annotations

import torch

from .measures import BlockMeasures

FEWEST = 2  # elements out of line that make a block an outlier: one may be a tie that was broken otherwise
SHARE = 0.01


def outlier_blocks(measures: BlockMeasures) -> torch.Tensor:
    """Which blocks of scales break the rule that the others keep: bool [scale rows, scale columns]."""
    used = measures.code != 0
    if measures.outside[used].eq(0).sum() * 2 <= used.sum():
        return torch.zeros_like(used)
    return measures.outside >= (measures.count * SHARE).clamp_min(FEWEST)
