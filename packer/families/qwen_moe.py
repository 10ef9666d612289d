"""Qwen mixtures of experts: `mlp.gate`, `mlp.shared_expert`, gated-delta layers of the hybrid models."""

from __future__ import annotations

from .family import ModelFamily
from .norms import GATED, PLAIN, VALUES
from .roles import Rule, tail

QWEN_MOE = ModelFamily(
    id="qwen-moe",
    model_types=(
        *("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_thinker", "olmoe"),
        *("hunyuan_v1_moe", "ernie4_5_moe", "flex_olmo", "dots1", "afmoe"),
    ),
    folds=dict.fromkeys(("qwen2_moe", "qwen3_moe"), PLAIN),
    passages=dict.fromkeys(("qwen2_moe", "qwen3_moe"), (VALUES, *GATED)),
)
QWEN_HYBRID = ModelFamily(
    id="qwen-hybrid",
    model_types=("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    rules=(
        Rule(tail(r"linear_attn\.in_proj_(?:qkvz|qkv|z)", r"linear_attn\.out_proj"), "linear"),
        Rule(tail(r"linear_attn\.in_proj_(?:ba|b|a)"), "small"),
    ),
)
