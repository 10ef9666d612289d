"""Every family of models, one visible line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.registry import Registry

from .config import text_config
from .deepseek import DEEPSEEK, GLM_MOE
from .dense import DENSE, FALCON
from .family import ModelFamily
from .mixtral import MIXTRAL
from .norms import Fold
from .qwen_moe import QWEN_HYBRID, QWEN_MOE
from .stacked import GEMMA4, GPT_OSS, LLAMA4

FAMILIES: Registry[ModelFamily] = Registry(
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
UNKNOWN = ModelFamily(id="unknown", model_types=(), experts_order=None)


def known_folds() -> dict[str, tuple[Fold, ...]]:
    """`model_type` -> the norms of its layers and what reads them, of every model for which some family tells."""
    return {kind: folds for family in FAMILIES.values() for kind, folds in family.folds.items()}


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family that config.json names; `UNKNOWN` has only the rules that all families share."""
    found = [config.get("model_type"), text_config(config).get("model_type")]
    return next((family for family in FAMILIES.values() if any(name in family.model_types for name in found)), UNKNOWN)
