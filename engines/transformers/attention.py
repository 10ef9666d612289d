"""Attention of transformers models: decode steps by `attend`, everything else by transformers' own `sdpa`.

Models ask by name which implementation they run: those that attend to a learned selection of keys (GLM-MoE-DSA,
DeepSeek V3.2) put it into the mask for `eager` and `sdpa` alone. Under a name of our own they would silently attend to
all keys. So the name stays `sdpa`, and what is registered under it is ours for the modules that were marked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tilewright.kernels.ops.attention import attend

NAME = "sdpa"
MARK = "_attends_by_tilewright"


def attention_forward(
    module: nn.Module,
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
    mine = getattr(module, MARK, False)
    sees_all = mine and query.shape[2] == 1 and attention_mask is None and not dropout
    biased = kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
    gradient = query.requires_grad or key.requires_grad or value.requires_grad
    fits = query.dtype == key.dtype == value.dtype and query.device.type == "cpu"
    if sees_all and fits and not biased and not gradient:
        return attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


AttentionInterface.register(NAME, attention_forward)


def use_attention(model: nn.Module) -> None:
    """Let `attend` run the decode steps of a transformers model where it runs `sdpa`; other models stay as they are."""
    for module in model.modules():
        if hasattr(module, "config"):
            setattr(module, MARK, True)
