"""Attention of decode steps: one query for each sequence and head, over the keys and values in a cache.

Nothing here is packed. It is ours for a measured cost: for one query, `sdpa` as transformers calls it takes five to ten
times as long (docs/runtime.md). Prompts, masks and gradients stay with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native  # noqa: F401  (loads the operators)
from . import fakes

_ATTEND = torch.ops.tilewright.attend.default


def attend(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`softmax(scale * q · keyᵀ) · value`, all in fp32 and rounded once; the tokens of the cache are cut into chunks.

    The bits depend neither on the instruction set, nor on the number of threads, nor on the batch.

    Args:
        q: fp32, bf16 or fp16 [B, H, 1, D].
        key: [B, H', T, D] of the same dtype; H is a multiple of H', and consecutive heads of `q` share one of `key`.
            Rows whose elements are not consecutive are copied.
        value: [B, H', T, D'], likewise.
        scale: Factor of the scores.

    Returns:
        [B, 1, H, D'] in the same dtype, as the Linear behind it reads it.
    """
    result: Tensor = _ATTEND(q, key, value, scale)
    return result


def _fake_attend(q: Tensor, key: Tensor, value: Tensor, _scale: float) -> Tensor:
    return q.new_empty((q.shape[0], 1, q.shape[1], value.shape[3]))


fakes.register("attend", _fake_attend)
