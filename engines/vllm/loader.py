"""The loader of packed directories: gives vLLM's model what is not packed."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.model_names import LAYER_NUMBER
from tilewright.kernels.packed.directory import PackedCheckpoint
from tilewright.kernels.packed.module_spec import QUANT_METHOD

from .config import TilewrightConfig
from .head import PlainEmbeddingMethod
from .linear import PackedLinearMethod, PlainLinearMethod, dequantized
from .mlp import replace_mlps

logger = init_logger("vllm.tilewright")  # children of `vllm` are configured
# Tensors that checkpoints carry and vLLM computes or does not use.
UNUSED = re.compile(r"\.(?:input_scale|input_zero_point|activation_scale|rotary_emb\.inv_freq)$|\.w_[kv]c(?:\.|$)")


@register_model_loader(QUANT_METHOD)
class TilewrightLoader(DefaultModelLoader):
    """Builds vLLM's model around packed modules, which stay in the mapped files, and loads the few other tensors."""

    def __init__(self, load_config: Any) -> None:
        load_config = copy.copy(load_config)
        load_config.load_format = "safetensors"  # the base class refuses names that it does not know
        super().__init__(load_config)

    def download_model(self, model_config: Any) -> None:
        """Nothing: the directory is found when the model is built."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Build, load, and run gated MLPs by one operator each.

        Raises:
            CheckpointError: The directory cannot be run, or its tensors are not those of the model; lists all of them.
        """
        config = vllm_config.quant_config
        if not isinstance(config, TilewrightConfig):
            raise CheckpointError(f"{model_config.model}: is no packed directory, so this loader cannot load it")
        config.used.clear()
        self._config, self._draft = config, model_config.runner_type == "draft"
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        if vllm_config.lora_config is None:  # adapters change gate, up and down one by one
            replace_mlps(model)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Give every parameter its tensor: the embedding as a view, the others copied.

        Raises:
            CheckpointError: A parameter has no tensor, or a packed module has no place in the model.
        """
        packed = self._config.packed()
        for module in model.modules():
            if isinstance(method := getattr(module, "quant_method", None), PackedLinearMethod):
                method.take_bias(module)
        given = self._view_embeddings(model, packed)
        loaded = model.load_weights(self._tensors(packed, model_config, given))
        if loaded is None:
            reason = f"{type(model).__name__} does not tell which tensors it loaded"
            raise CheckpointError(f"{packed.root}: {reason}, so nothing could be served safely")
        given |= {f"{path}.weight" for path, method in _methods(model) if isinstance(method, PlainLinearMethod)}
        if missing := sorted({name for name, _ in model.named_parameters()} - loaded - given):
            lines = [f"`{name}` is not in the files" for name in missing]
            raise CheckpointError(f"{packed.root}: does not fit {type(model).__name__}:\n  " + "\n  ".join(lines))

    def _view_embeddings(self, model: nn.Module, packed: PackedCheckpoint) -> set[str]:
        """Let embeddings be views of the mapped file; returns vLLM's names of those that are."""
        places = {self._config.renamed(name): name for name in packed.plain}
        given = set()
        for path, module in model.named_modules():
            name = f"{path}.weight"
            if not isinstance(module, VocabParallelEmbedding) or name not in places:
                continue
            method, rows = module.quant_method, module.shard_indices
            if not isinstance(method, PlainEmbeddingMethod):
                continue
            weight = packed.tensor(places[name])[rows.org_vocab_start_index : rows.org_vocab_end_index]
            if weight.shape == module.weight.shape and weight.dtype == module.weight.dtype:
                module.weight.data = weight
                given.add(name)
        return given

    def _tensors(self, packed: PackedCheckpoint, model_config: Any, given: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that vLLM loads, under their names in the checkpoint."""
        for name in packed.plain:
            if not UNUSED.search(name) and self._config.renamed(name) not in given:
                yield name, packed.tensor(name)
        layers = model_config.hf_text_config.num_hidden_layers
        for name in packed.specs.keys() - self._config.used:
            layer = LAYER_NUMBER.search(name)
            later = bool(layer and int(layer[1]) >= layers)  # of multi-token prediction
            if UNUSED.search(name) or later != self._draft:
                continue
            yield from self._handed_over(packed, name, model_config.dtype)

    def _handed_over(self, packed: PackedCheckpoint, name: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """A packed module that no layer asked for (vLLM builds it without a quantization config), as plain tensors."""
        spec = packed.specs[name]
        if spec.whole:
            reason = "vLLM runs it as a plain matrix, of which this directory holds a share only"
            raise CheckpointError(
                f"{packed.root}: `{name}`: {reason}", hint="leave it out with --exclude, or pack uncut"
            )
        logger.warning("%s is run by vLLM itself, as a plain matrix", name)
        module = packed.weight(name)
        weight = dequantized(module).to(dtype)
        for source, rows in zip(spec.sources or (name,), weight.split(spec.source_rows, -2), strict=True):
            if weight.dim() == 2:
                yield f"{source}.weight", rows
            else:
                for number, expert in zip(spec.numbers, rows, strict=True):
                    yield f"{source.format(number)}.weight", expert
        if module.bias is not None and weight.dim() == 2:
            yield from zip(
                (f"{source}.bias" for source in spec.sources),
                module.bias.to(dtype).split(spec.source_rows),
                strict=True,
            )


def _methods(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        yield path, getattr(module, "quant_method", None)
