"""Attention of transformers models: decode steps by `attend`, everything else by transformers' own `sdpa`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tilewright.kernels.ops.attention import attend

NAME = "tilewright"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention; arguments and result are those of its `sdpa_attention_forward`.

    A single query without a mask sees all of the cache, which is what `attend` computes. Masks (padding, windows,
    several queries), biases and gradients are left to `sdpa`.
    """
    sees_all = query.shape[2] == 1 and attention_mask is None and not dropout
    biased = kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
    gradient = query.requires_grad or key.requires_grad or value.requires_grad
    fits = query.dtype == key.dtype == value.dtype and query.device.type == "cpu"
    if sees_all and fits and not biased and not gradient:
        return attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_attention(model: Any) -> None:
    """Let `attention_forward` run a transformers model that would use `sdpa`; `set_attn_implementation` undoes it."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
