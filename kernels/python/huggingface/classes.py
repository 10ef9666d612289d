"""The class of transformers that a config.json names, built without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..errors import CheckpointError

TRUST = "read the Python code in the directory; if you trust it, pass trust_remote_code=True"
AUTO_MAP = "auto_map"
# Where config.json names no class: what transformers loads for its model_type, text first.
_CLASSES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)


def read_config(root: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a directory as transformers reads it; nothing is fetched, and nothing asked on the terminal.

    Raises:
        CheckpointError: transformers does not know the architecture, or only code in the directory does.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            root, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises whatever a broken config.json makes it come upon
        raise CheckpointError(f"{root}: transformers builds no model of its config: {first_words(error)}") from error
    return config


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a config names, such as `LlavaForConditionalGeneration`; else the one of its model type.

    Raises:
        CheckpointError: transformers has none that predicts tokens.
    """
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            wanted = found.config_class
            if wanted is not None and isinstance(config, wanted):
                return found
    for mapping in _CLASSES:
        if type(config) in mapping:
            classes: Any = mapping[type(config)]
            chosen: type[PreTrainedModel] = classes[0] if isinstance(classes, tuple) else classes
            return chosen
    named = ", ".join(config.architectures or ()) or "none"
    raise CheckpointError(
        f"transformers {transformers.__version__} has no class that predicts tokens for model_type "
        f"`{config.model_type}` (architectures: {named})"
    )


def build_empty(
    config: PreTrainedConfig, trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model of a config without weights: parameters and buffers on the meta device.

    Args:
        config: As `read_config` gives it; its `quantization_config` is taken away.
        trust_remote_code: Run the code that the directory brings for its model.
        dtype: Of the parameters; None takes the one that the config names.

    Raises:
        CheckpointError: transformers has no such model, or cannot build it of these values.
    """
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    chosen: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device("meta"):
            if trust_remote_code and getattr(config, AUTO_MAP, None):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=True, **chosen)
            else:
                model = model_class(config)._from_config(config, **chosen)
    except CheckpointError:
        raise
    except Exception as error:  # likewise
        raise CheckpointError(f"transformers builds no model of its config: {first_words(error)}") from error
    return model.requires_grad_(False)


def first_words(error: Exception) -> str:
    """The beginning of what an error of another library says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
