"""Dense decoders: Llama, Qwen, Mistral, Gemma, Phi, Falcon and their like."""

from __future__ import annotations

from .family import ModelFamily
from .norms import PLAIN
from .roles import Rule, tail

DENSE = ModelFamily(
    id="dense",
    model_types=(
        "llama",
        "qwen2",
        "qwen3",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen3_vl",
        "qwen3_vl_text",
        "mistral",
        "mistral3",
        "ministral",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "phi3",
        "glm",
        "glm4",
        "olmo2",
        "olmo3",
        "smollm3",
        "llava",
        "llava_next",
    ),
    folds=dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), PLAIN),
)
FALCON = ModelFamily(
    id="falcon",
    model_types=("falcon",),
    rules=(Rule(tail("query_key_value", r"self_attention\.dense", "dense_h_to_4h", "dense_4h_to_h"), "linear"),),
)
