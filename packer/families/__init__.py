"""Every family of models, one visible line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.errors import quoted
from tilewright.kernels.registry import Registry

from .config import text_config
from .deepseek import DEEPSEEK, GLM_MOE
from .dense import DENSE, FALCON
from .encoders import BART, BERT, T5, WHISPER
from .family import ModelFamily
from .gpt import GPT, GPT2, GPT_NEOX
from .hybrid import HYBRID, MAMBA, RECURRENT
from .mixtral import MIXTRAL
from .norms import Fold, Passage
from .parallel_experts import GRANITE_MOE, JETMOE, STEP3
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
        GPT2,
        GPT,
        GPT_NEOX,
        MAMBA,
        HYBRID,
        RECURRENT,
        GRANITE_MOE,
        JETMOE,
        STEP3,
        BERT,
        T5,
        BART,
        WHISPER,
    ),
)
UNKNOWN = ModelFamily(id="unknown", model_types=(), experts_order=None)


def known_folds() -> dict[str, tuple[Fold, ...]]:
    """`model_type` -> the norms of its layers and what reads them, of every model for which some family tells."""
    return {kind: folds for family in FAMILIES.values() for kind, folds in family.folds.items()}


def known_passages() -> dict[str, tuple[Passage, ...]]:
    """`model_type` -> the Linears of its layers whose outputs another one reads channel by channel."""
    return {kind: passages for family in FAMILIES.values() for kind, passages in family.passages.items()}


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family that config.json names; `UNKNOWN` has only the rules that all families share."""
    found = [config.get("model_type"), text_config(config).get("model_type")]
    return next((family for family in FAMILIES.values() if any(name in family.model_types for name in found)), UNKNOWN)


def unknown_model(config: Mapping[str, Any]) -> list[str]:
    """A note on a model whose family is not known here; none for one that is, or that names no `model_type`."""
    kind = config.get("model_type")
    if kind is None or family_of(config) is not UNKNOWN:
        return []
    return [
        f"model_type {quoted(str(kind))} is not known to Tilewright: names are judged by the rules that all families "
        "share; load_model (transformers), vLLM and SGLang may not know it either"
    ]
