"""Norms by the root mean square in one operator.

Nothing here is packed. It is ours for a measured cost: beside packed Linears, the eight calls of a norm that
transformers writes took three times as long in a decode step as one takes (docs/runtime.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native  # noqa: F401  (loads the operators)
from . import fakes

_RMS_NORM = torch.ops.tilewright.rms_norm.default


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * round(x / sqrt(mean(x^2) + epsilon))`: fp32, rounded to the dtype of `x`, then to that of the result.

    `reference.rms_norm` states every rounding. The bits depend neither on the instruction set nor on the batch.

    Args:
        x: fp32, bf16 or fp16 [..., K].
        weight: fp32, bf16 or fp16 [K].
        epsilon: Added to the mean of squares.

    Returns:
        [..., K] in the dtype that both have, fp32 if they differ; contiguous.
    """
    result: Tensor = _RMS_NORM(x, weight, epsilon)
    return result


def _fake_rms_norm(x: Tensor, weight: Tensor, _epsilon: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


fakes.register("rms_norm", _fake_rms_norm)
