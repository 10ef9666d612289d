"""Gated MLPs of a transformers model that one operator computes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from tilewright.kernels.model_names import DOWN, GATE, GATE_UP, UP
from tilewright.kernels.modules import PackedLinear, PackedMlp, PackedStack
from tilewright.kernels.modules.mlp import why_not_fused
from tilewright.kernels.packed.directory import PackedCheckpoint

_APART, _JOINED = {GATE, UP, DOWN}, {GATE_UP, DOWN}
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def replace_mlps(model: nn.Module, packed: PackedCheckpoint) -> None:
    """Let `PackedMlp` run the gated MLPs of a model whose gate and up are packed as one matrix.

    Which modules are such MLPs, and with which activation, is tried out: names do not tell what a class computes.
    """
    for path, module in list(model.named_modules()):
        linears = {name for name, child in module.named_children() if isinstance(child, PackedLinear)}
        name = f"{path}.{GATE_UP}"
        if linears not in (_APART, _JOINED) or name not in packed.specs:
            continue
        gate_up, down = packed[name], packed[f"{path}.{DOWN}"]
        assert isinstance(gate_up, PackedLinear)
        assert isinstance(down, PackedLinear)
        activation = None if why_not_fused(gate_up, down) else find_activation(module)
        if activation:
            upper, lower = (
                PackedStack(name, part.spec, dict(part.named_buffers()), part.activation_scales)
                for part in (gate_up, down)
            )
            model.set_submodule(path, PackedMlp(path, upper, lower, activation))


def find_activation(module: nn.Module) -> str | None:
    """The activation with which a module computes `down(act(gate(x)) * up(x))`; None if it computes something else.

    Args:
        module: One with children `gate_proj` and `up_proj`, or `gate_up_proj`, and `down_proj`, which are not called:
            small matrices take their places in a copy.
    """
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = ((16, 8), (16, 8), (8, 16), (3, 8))
    gate, up, down, x = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    small = {GATE: gate, UP: up, GATE_UP: torch.cat([gate, up]), DOWN: down}
    for name in small.keys() & twin._modules.keys():
        n, k = small[name].shape
        linear = nn.Linear(k, n, bias=False, dtype=torch.float64)
        linear.weight = nn.Parameter(small[name], requires_grad=False)
        twin._modules[name] = linear
    try:
        with torch.no_grad():
            y = twin(x)
    except Exception:  # it has more parts, of sizes that do not fit the small matrices
        return None
    for activation, function in _FUNCTIONS.items():
        if torch.allclose(y, (function(x @ gate.T) * (x @ up.T)) @ down.T, rtol=1e-9, atol=1e-12):
            return activation
    return None
