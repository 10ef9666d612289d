"""Tables that lie in no file: rotary frequencies, scales of embeddings, positions; computed as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, initialization

UNSET = -(1 << 30)  # no value of an integer buffer


def compute_buffers(model: PreTrainedModel) -> list[str]:
    """Give every buffer that is on the meta device and kept out of checkpoints its value.

    First as transformers initialises what it finds in no file; what that leaves open is taken from a second model,
    whose constructor computes its buffers, and whose parameters are never touched.

    Returns:
        Names of those that stay unknown.
    """
    unknown: list[str] = []
    for path, module in list(model.named_modules()):
        keys = [
            key
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and key in module._non_persistent_buffers_set
        ]
        if keys:
            unknown += [f"{path}.{key}" if path else key for key in _initialise(model, module, keys)]
    if unknown:
        with _real_buffers():
            other = type(model)._from_config(model.config, dtype=model.dtype)
        buffers = dict(other.named_buffers())
        for name in list(unknown):
            owner, _, key = name.rpartition(".")
            if name in buffers and not buffers[name].is_meta:
                model.get_submodule(owner)._buffers[key] = buffers[name]
                unknown.remove(name)
    return unknown


@contextmanager
def _real_buffers() -> Iterator[None]:
    """Within, models are built with real buffers and parameters on the meta device."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        with initialization.no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _initialise(model: Any, module: nn.Module, keys: list[str]) -> list[str]:
    """Compute some buffers of a module as transformers initialises it; returns those that stay unknown."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # as transformers marks what it has loaded
    for key in keys:
        old = module._buffers[key]
        assert old is not None
        unset = torch.nan if torch.is_floating_point(old) else UNSET
        module._buffers[key] = torch.full(old.shape, unset, dtype=old.dtype)
    owner: Any = next((part for part in reversed(_owners(model, module)) if hasattr(part, "_init_weights")), model)
    with torch.no_grad():
        owner._init_weights(module)
    return [key for key in keys if _unset(module._buffers[key])]


def _unset(buffer: torch.Tensor | None) -> bool:
    return buffer is None or bool((buffer.isnan() if torch.is_floating_point(buffer) else buffer == UNSET).any())


def _owners(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that `module` lies in, outermost first; each sub-model of transformers has its own initialisation."""
    path = next(name for name, part in model.named_modules() if part is module)
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
