"""Features of families switched off in a model of transformers, to see that they matter to its logits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

FAR = 4096  # a window, a chunk or a selection that holds every input
MULTIPLIERS = (
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
    "attention_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
)
Load = Callable[..., Any]


def without(feature: str, load: Load, source: Path) -> Any:
    """The model of a checkpoint with one of its features switched off.

    Args:
        feature: One that `FEATURES` names.
        load: Loads a checkpoint; takes keyword arguments of `from_pretrained`.
        source: The checkpoint.
    """
    return FEATURES[feature](load, source)


def _by_config(**changed: Any) -> Callable[[Load, Path], Any]:
    """Load with other values in the config of the text model."""

    def change(load: Load, source: Path) -> Any:
        config = load(source).config
        text = config.get_text_config(decoder=True)
        for key, value in changed.items():
            if hasattr(text, key):
                setattr(text, key, value)
        return load(source, config=config)

    return change


def _without_rope_base(load: Load, source: Path) -> Any:
    """Rotary embeddings of a base so large that all but the fastest stand still."""
    config = load(source).config
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 1e12}
    return load(source, config=config)


def _by_tensors(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Load, Path], Any]:
    """Load, and change the parameters and buffers whose name ends so."""

    def switch(load: Load, source: Path) -> Any:
        model = load(source)
        found = [t for name, t in (*model.named_parameters(), *model.named_buffers()) if name.endswith(ending)]
        assert found, f"no tensor ends with {ending}"
        with torch.no_grad():
            for tensor in found:
                tensor.copy_(change(tensor))
        return model

    return switch


def _without_norm_offset(load: Load, source: Path) -> Any:
    """Norms that multiply by 1 + weight multiply by the weight alone."""
    model = load(source)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
                module.weight -= 1
    return model


def _without_alibi(load: Load, source: Path) -> Any:
    model = load(source)
    run, module = model.transformer.forward, sys.modules[type(model.transformer).__module__]

    def forward(*arguments: Any, **named: Any) -> Any:
        with mock.patch.object(module, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads, device=device)):
            return run(*arguments, **named)

    model.transformer.forward = forward
    return model


FEATURES: dict[str, Callable[[Load, Path], Any]] = {
    "rope": _by_tensors("inv_freq", torch.zeros_like),
    "rope-base": _without_rope_base,
    "window": _by_config(sliding_window=FAR),
    "chunk": _by_config(attention_chunk_size=FAR),
    "selection": _by_config(index_topk=FAR),
    "cap": _by_config(attn_logit_softcapping=None),
    "final-cap": _by_config(final_logit_softcapping=None),
    "multipliers": _by_config(**dict.fromkeys(MULTIPLIERS, 1.0)),
    "sinks": _by_tensors("sinks", lambda sinks: torch.full_like(sinks, -1e4)),
    "norm-offset": _without_norm_offset,
    "alibi": _without_alibi,
}
