"""Packed directories by transformers' own door: `AutoModelForCausalLM.from_pretrained(DIRECTORY)`, `pipeline`.

Importing `tilewright.engines.transformers` registers a quantizer for `quant_method: tilewright`. transformers builds
the model without weights and hands it to the quantizer, which runs it by packed modules as `load_model` does. In
between, transformers would read the files and initialise what it misses there: it is shown a model without tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tilewright.kernels.errors import CheckpointError, KernelUnavailableError
from tilewright.kernels.packed.directory import load_packed
from tilewright.kernels.packed.manifest import MANIFEST_FILE
from tilewright.kernels.packed.module_spec import QUANT_METHOD

from ..pack_once import local_directory
from .model import run_packed


@register_quantization_config(QUANT_METHOD)
class TilewrightConfig(QuantizationConfigMixin):
    """`quantization_config` of a packed directory's config.json."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # transformers declares its own methods alone


@register_quantizer(QUANT_METHOD)
class TilewrightQuantizer(HfQuantizer):
    """Runs a model that transformers has built of a packed directory's config."""

    requires_calibration = True  # in transformers' words: nothing is quantized while it is loaded

    def update_device_map(self, device_map: Any) -> None:
        """Take the one device that is asked for; nothing is left for transformers to put there.

        Raises:
            KernelUnavailableError: Several are.
        """
        wanted = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        devices = {str(device) for device in wanted - {None, "auto", "balanced", "balanced_low_0", "sequential"}}
        if len(devices) > 1:
            hint = "leave `device_map` out; several processes run a directory of `pack-for-cpu --tp` by load_model"
            raise KernelUnavailableError(f"device_map names {', '.join(sorted(devices))}", hint=hint)
        self._device = devices.pop() if devices else "cpu"

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What is asked for; compared with the directory once that is known."""
        self._dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        folder = Path(checkpoint_files[0]).parent if checkpoint_files else Path(model.config.name_or_path)
        if not (folder / MANIFEST_FILE).is_file():  # transformers fetched the shards alone
            commit = getattr(model.config, "_commit_hash", None)
            folder = local_directory(str(model.config.name_or_path), commit)
        self._packed = load_packed(folder, device=self._device)
        text = self._packed.config.get("text_config", {}) | self._packed.config
        stated = text.get("dtype") or text.get("torch_dtype")
        if stated and self._dtype != getattr(torch, str(stated), self._dtype):
            hint = 'leave `dtype` out, or pass dtype="auto"'
            raise CheckpointError(f"{folder}: dtype={self._dtype} is asked for, it is packed for {stated}", hint=hint)
        self._shown = _show_without_tensors(model)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        _restore(model, self._shown)
        run_packed(model, self._packed)

    def is_serializable(self) -> bool:
        """Yes: `save_pretrained` copies the directory."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No: packed layers compute no gradients."""
        return False


_MISSING = object()


def _show_without_tensors(model: nn.Module) -> dict[str, Any]:
    """Let transformers' loading find neither tensors to load nor to initialise nor to tie; returns what was there."""
    shown = {
        "state_dict": lambda *_, **__: {},
        "named_non_persistent_buffers": lambda *_, **__: (),
        "initialize_weights": lambda *_, **__: None,
        "tie_weights": lambda *_, **__: None,
        "all_tied_weights_keys": {},
        "_keys_to_ignore_on_load_unexpected": {""},  # a pattern that every name matches
    }
    before = {name: model.__dict__.get(name, _MISSING) for name in shown}
    model.__dict__.update(shown)
    return before


def _restore(model: nn.Module, before: dict[str, Any]) -> None:
    for name, value in before.items():
        del model.__dict__[name]
        if value is not _MISSING:
            model.__dict__[name] = value
