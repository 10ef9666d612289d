"""Every family of models, one visible line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.registry import Registry

from .base import Architecture
from .deepseek import DEEPSEEK, GLM_MOE
from .dense import DENSE, FALCON
from .mixtral import MIXTRAL
from .qwen_moe import QWEN_HYBRID, QWEN_MOE
from .stacked import GEMMA4, GPT_OSS, LLAMA4

ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    (
        DENSE,
        FALCON,
        MIXTRAL,
        QWEN_MOE,
        QWEN_HYBRID,
        DEEPSEEK,
        GLM_MOE,
        GPT_OSS,
        LLAMA4,
        GEMMA4,
    ),
)
UNKNOWN = Architecture(id="unknown", model_types=(), experts_order=None)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: `text_config` or the like, or all of it."""
    for key in ("text_config", "language_config", "llm_config", "thinker_config"):
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    return config


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The family that config.json names; `UNKNOWN` has only the rules that all families share."""
    found = [config.get("model_type"), text_config(config).get("model_type")]
    return next(
        (family for family in ARCHITECTURES.values() if any(name in family.model_types for name in found)), UNKNOWN
    )
