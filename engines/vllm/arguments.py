"""What packed models need of vLLM's arguments, set where the user named only the model."""

from __future__ import annotations

import functools
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from tilewright.kernels.packed.module_spec import QUANT_METHOD

from .norms import OPERATORS

_AUTO = {"auto", "hf", "safetensors"}


def _prepared(create: Any) -> Any:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        model = config.model_config
        if model is not None and model.quantization == QUANT_METHOD:
            if config.load_config.load_format in _AUTO:
                config.load_config.load_format = QUANT_METHOD
            _prefer_norms(config, self)
        return config

    create_engine_config.is_tilewright = True  # type: ignore[attr-defined]
    return create_engine_config


def _prefer_norms(config: Any, arguments: Any) -> None:
    """Put our norms before vLLM's, unless the user chose some."""
    chosen = config.kernel_config.ir_op_priority
    for name in OPERATORS:
        order = getattr(chosen, name)
        if config.device_config.device_type == "cpu" and order == ["native"]:
            setattr(chosen, name, [QUANT_METHOD, *order])


if not hasattr(EngineArgs.create_engine_config, "is_tilewright"):
    EngineArgs.create_engine_config = _prepared(EngineArgs.create_engine_config)
