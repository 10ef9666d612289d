"""What a config.json calls the sizes and counts of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.model_names import ACTIVATION_NAMES, TIED
from tilewright.kernels.packed.module_spec import Gating

TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
ZERO_EXPERTS = "zero_expert_num"  # experts after the others that give back what they are fed
VALUES_ARE_KEYS = "attention_k_eq_v"  # layers without a projection of values of their own
EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
LAYERS, HIDDEN, HEADS, KV_HEADS = "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"
HEAD_SIZE = "head_dim"
LATENT_SIZES = (HEADS, "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")  # of latent attention
ACTIVATIONS = ("hidden_act", "hidden_activation")
GATE_SLOPE, GATE_BOUND = "swiglu_alpha", "swiglu_limit"
GATE_BOUNDS = (GATE_BOUND, "swiglu_limits", "swiglu_limits_shared")  # of families that clamp in ways of their own
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: `text_config` or the like, or all of it."""
    for key in TEXT_PARTS:
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    return config


def text_value(config: Mapping[str, Any], key: str) -> Any:
    """A value of the top level, or of the text model's part."""
    return config.get(key, text_config(config).get(key))


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Whether the output head is the embedding; None if config.json does not say."""
    stated = text_value(config, TIED)
    return None if stated is None else bool(stated)


def head_size(config: Mapping[str, Any]) -> int:
    """Channels of an attention head; 0 where the config does not say."""
    stated, hidden, heads = (text_config(config).get(key) for key in (HEAD_SIZE, HIDDEN, HEADS))
    if isinstance(stated, int) and stated > 0:
        return stated
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 0


def expert_count(config: Mapping[str, Any]) -> int:
    """Number of routed experts of a layer; 0 for a dense model."""
    text = text_config(config)
    return next((text[key] for key in EXPERT_COUNTS if isinstance(text.get(key), int)), 0)


def has_zero_experts(config: Mapping[str, Any]) -> bool:
    """Whether the router also chooses among experts that compute nothing, numbered after the others."""
    return bool(text_config(config).get(ZERO_EXPERTS))


def gating_of(config: Mapping[str, Any], gate: str = "") -> Gating | None:
    """What routed experts compute between their products; None where the operators know nothing that is sure to be it.

    Args:
        config: config.json of the model.
        gate: What the model's family says that it is.
    """
    text = text_config(config)
    if gate:
        slope, bound = text.get(GATE_SLOPE), text.get(GATE_BOUND)
        return Gating(gate, float(slope or Gating.alpha), float(bound or Gating.limit))
    if any(text.get(key) for key in GATE_BOUNDS):
        return None
    names = [text[key] for key in ACTIVATIONS if isinstance(text.get(key), str)]
    return Gating(ACTIVATION_NAMES[names[0]]) if names and names[0] in ACTIVATION_NAMES else None


def announced_mtp(config: Mapping[str, Any]) -> int:
    """Number of MTP layers that the config announces."""
    found = (text_config(config).get(key) for key in MTP_COUNTS)
    return next((value for value in found if isinstance(value, int)), 0)
