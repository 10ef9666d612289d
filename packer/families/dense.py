"""Dense decoders: Llama, Qwen, Mistral, Gemma, Phi, Falcon and their like."""

from __future__ import annotations

from .family import ModelFamily
from .norms import GATED, PLAIN, VALUES
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
        *("olmo", "granite", "cohere", "cohere2", "stablelm", "bitnet", "diffllama", "ernie4_5", "exaone4", "helium"),
        *("hunyuan_v1_dense", "seed_oss", "internlm3", "vaultgemma", "ministral3", "minicpm", "mimo", "nanochat"),
        *("internvl", "paligemma", "aya_vision", "glm4v", "glm4v_text", "mllama", "mllama_text_model"),
    ),
    folds=dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), PLAIN),
    passages=dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (VALUES, *GATED)),
)
FALCON = ModelFamily(
    id="falcon",
    model_types=("falcon", "bloom"),
    rules=(Rule(tail(r"self_attention\.dense"), "linear"),),
)
