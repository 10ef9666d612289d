"""A streamed model that computes in fp32 with the weights that a directory stands for: plain, or dequantized."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tilewright.kernels.errors import VerifyError

from ..checkpoint.contents import Contents
from ..families.experts import LONG
from .stream import StreamedModel

STACKED = {f"{LONG.container}.{name}": LONG.stacks[name] for name in (LONG.gate_up, LONG.down)}


def model_config(root: Path) -> PreTrainedConfig:
    """The config of a model directory as transformers reads it; nothing is fetched.

    Raises:
        VerifyError: transformers does not know this architecture.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(root, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        hint = "levels weights and layers of verify-accuracy, and solvers without a text, need no architecture"
        raise VerifyError(f"{root}: transformers cannot build this model: {error}", hint=hint) from error
    return config


def build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model without weights: parameters on the meta device, computed tables in place."""
    config.quantization_config = None
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if _computed(child):
                setattr(module, name, type(child)(config=child.config))
    return model.requires_grad_(False)


def _computed(module: nn.Module) -> bool:
    """Whether a module is nothing but tables that its constructor computes, such as rotary frequencies."""
    names = set(module.state_dict())
    return not names and any(buffer.is_meta for buffer in module.buffers(recurse=False))


def stream_dequantized(config: PreTrainedConfig, contents: Contents) -> StreamedModel:
    """Run the weights of `contents` in fp32, one layer at a time.

    Raises:
        VerifyError: A parameter of the architecture is not in the directory, or not in its shape.
    """

    def fill(module: nn.Module, path: str) -> None:
        state = {
            name: _parameter(contents, f"{path}.{name}" if path else name, tuple(blank.shape))
            for name, blank in module.state_dict().items()
        }
        module.load_state_dict(state, assign=True)
        for name, buffer in module.named_buffers():
            if buffer.is_meta:
                raise VerifyError(f"{path}.{name}: the architecture computes this table where Tilewright cannot see it")

    def empty(module: nn.Module, _: str) -> None:
        module.to("meta")

    return StreamedModel(build_empty(config), fill, empty)


def _parameter(contents: Contents, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The values of one parameter, experts stacked [E, N, K] as transformers holds them; fp32."""
    stem = next((suffix for suffix in STACKED if name.endswith(suffix)), None)
    if stem is None or contents.find(name):
        return _values(contents, name, shape)
    base = name[: -len(stem)] + LONG.container
    n = shape[1] // len(STACKED[stem])
    stack = torch.empty(shape)
    for expert, rows in enumerate(stack):
        for part, projection in zip(rows.split(n), STACKED[stem], strict=True):
            part.copy_(_values(contents, f"{base}.{expert}.{projection}.weight", (n, shape[2])))
    return stack


def _values(contents: Contents, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    weight = contents.find(name)
    if weight is None or weight.shape != shape:
        is_there = f"has shape {list(weight.shape)}" if weight else "is missing"
        raise VerifyError(f"{contents.title}: `{name}` {is_there}, the architecture wants {list(shape)}")
    values = weight.values()
    contents.forget(weight)
    return values
