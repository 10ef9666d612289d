"""Sizes of matrices that follow from config.json alone: a second opinion on how stored codes are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .config import HEAD_SIZE, HEADS, HIDDEN, text_config
from .experts import LONG, SHORT
from .roles import unwrapped

LAYER = re.compile(r"^model\.layers\.\d+\.")
INPUTS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    LONG.gate,
    LONG.up,
    LONG.gate_up,
    SHORT.gate,
    SHORT.up,
)  # K = hidden
OUTPUTS = ("o_proj", LONG.down, SHORT.down)  # N = hidden
# Keys of models whose Linears of these names have another width, in some of their layers or in all.
OTHERWISE = re.compile(r"latent|attention_hidden_size|lora_rank|v_head_dim|global_head_dim|hidden_size_list|d_model")


def size_conflicts(shapes: Mapping[str, tuple[int, int]], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Matrices whose sizes do not agree with config.json, or with one another.

    Args:
        shapes: Module path -> (N, K), of Linears and of single experts.
        config: config.json of the model.

    Yields:
        Module path, and what is wrong.
    """
    text = text_config(config)
    hidden, heads, head = (text.get(key) for key in (HIDDEN, HEADS, HEAD_SIZE))
    special = any(OTHERWISE.search(key) for key in text)
    width = heads * head if isinstance(heads, int) and isinstance(head, int) and not special else None
    for module, (n, k) in shapes.items():
        if not LAYER.match(unwrapped(module)):
            continue
        stem, _, name = module.rpartition(".")
        if isinstance(hidden, int) and not special:
            side, size = ("columns", k) if name in INPUTS else ("rows", n) if name in OUTPUTS else ("", hidden)
            if size != hidden:
                yield module, f"has {size} {side}, config.json says {HIDDEN} = {hidden}"
        if name == "o_proj" and width not in {None, k}:
            yield module, f"has {k} columns, config.json says {heads} heads of {head}"
        if name in {LONG.down, SHORT.down}:
            for other in (LONG.gate, LONG.up) if name == LONG.down else (SHORT.gate, SHORT.up):
                beside = shapes.get(f"{stem}.{other}")
                if beside and beside[0] != k:
                    yield module, f"has {k} columns, and `{other}` beside it {beside[0]} rows"
