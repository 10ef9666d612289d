"""What packed models need of vLLM's arguments, set where the user named only the model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from tilewright.kernels.packed.module_spec import QUANT_METHOD

from ..pack_once import is_packed, local_directory, packed_once
from .norms import OPERATORS

logger = init_logger("vllm.tilewright")  # children of `vllm` are configured
_AUTO = {"auto", "hf", "safetensors"}


def _prepared(create: Any) -> Any:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.load_format == QUANT_METHOD:
            _serve_packed(self)
        config = create(self, *args, **kwargs)
        model = config.model_config
        if model is not None and model.quantization == QUANT_METHOD:
            if config.load_config.load_format in _AUTO:
                config.load_config.load_format = QUANT_METHOD
            _prefer_norms(config, self)
        return config

    create_engine_config.is_tilewright = True  # type: ignore[attr-defined]
    return create_engine_config


def _serve_packed(arguments: Any) -> None:
    """Of a checkpoint that is not packed, serve a packed copy, which the first start makes.

    `--download-dir` names the folder of such copies; by default they lie beside the checkpoint.
    """
    source = local_directory(arguments.model, arguments.revision)
    if is_packed(source):
        return
    tp = arguments.tensor_parallel_size
    ep = tp * arguments.data_parallel_size if arguments.enable_expert_parallel else 1
    folder = Path(arguments.download_dir) if arguments.download_dir else None
    arguments.served_model_name = arguments.served_model_name or [arguments.model]
    arguments.model = str(packed_once(source, folder, tp, ep, logger.info))
    arguments.quantization = None  # the packed copy's own


def _prefer_norms(config: Any, arguments: Any) -> None:
    """Put our norms before vLLM's, unless the user chose some."""
    chosen = config.kernel_config.ir_op_priority
    for name in OPERATORS:
        order = getattr(chosen, name)
        if config.device_config.device_type == "cpu" and order == ["native"]:
            setattr(chosen, name, [QUANT_METHOD, *order])


if not hasattr(EngineArgs.create_engine_config, "is_tilewright"):
    EngineArgs.create_engine_config = _prepared(EngineArgs.create_engine_config)
