"""What a family of models is to the table, and the sizes that its tiny configs share.

A family's `features` are what distinguishes its attention, norms and scales; `features.py` can switch each of them off,
and the table test holds that this moves the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WINDOW = 8  # tokens that a window, a chunk or a selection of keys lets a token see; the inputs are longer
THETA = 100.0  # base of rotary embeddings: turns that matter within the length of the inputs
ROPE = {"rope_type": "default", "rope_theta": THETA}
LONG_ROPE = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 16}
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TEXT = BASE | {"intermediate_size": 128, "num_key_value_heads": 2, "rope_parameters": ROPE}
HEAD = TEXT | {"head_dim": 16}
MOE = HEAD | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL_MOE = HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
LATENT = TEXT | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
INDEXED = LATENT | {
    "index_topk": WINDOW,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
BOTH_ROPES = {"sliding_attention": ROPE, "full_attention": ROPE | {"rope_theta": 1000.0}}
DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
PLAIN_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARES = PLAIN_VISION | {"image_size": 32, "patch_size": 16}
QWEN_VISION = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "patch_size": 16}
QWEN_IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
GLM_IDS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "image_start_token_id": 92,
    "image_end_token_id": 93,
    "video_start_token_id": 94,
    "video_end_token_id": 95,
}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}
GEMMA_IDS = {"boi_token_id": 90, "eoi_token_id": 91, "image_token_id": 92}


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        model_type: As config.json has it.
        options: What its tiny config differs in from the defaults.
        features: What its logits depend on, beyond matrices: names in `features.FEATURES`.
        title: What people call it, where that is not the model type.
        group: dense, MoE, hybrid, multimodal or encoder-decoder.
        routed: A router chooses experts, so that rounding sends a few tokens another way.
        refused: Steps of the table that are refused, each with a regex that finds the reason in the message.
    """

    model_type: str
    options: dict[str, Any]
    features: tuple[str, ...] = ()
    title: str = ""
    group: str = "dense"
    routed: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What people call it."""
        return self.title or self.model_type.replace("_", " ").capitalize()


def dense(model_type: str, options: dict[str, Any], *features: str, **more: Any) -> Family:
    return Family(model_type, options, features, **more)


def moe(model_type: str, options: dict[str, Any], *features: str, **more: Any) -> Family:
    return Family(model_type, options, features, group="MoE", routed=True, **more)


def hybrid(model_type: str, options: dict[str, Any], *features: str, **more: Any) -> Family:
    return Family(model_type, options, features, group="hybrid", **more)


def vision(model_type: str, options: dict[str, Any], *features: str, **more: Any) -> Family:
    return Family(model_type, options, features, group="multimodal", **more)
