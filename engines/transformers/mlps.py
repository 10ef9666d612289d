"""Gated MLPs of a transformers model that one operator computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tilewright.kernels.model_names import DOWN, GATE, GATE_UP, UP
from tilewright.kernels.modules import PackedLinear, PackedMlp, PackedStack
from tilewright.kernels.modules.mlp import why_not_fused
from tilewright.kernels.packed.directory import PackedCheckpoint

from .. import gated_mlp

_APART, _JOINED = {GATE, UP, DOWN}, {GATE_UP, DOWN}


def replace_mlps(model: nn.Module, packed: PackedCheckpoint, places: Mapping[str, str]) -> None:
    """Let `PackedMlp` run the gated MLPs of a model whose gate and up are packed as one matrix.

    Which modules are such MLPs, and with which activation, is tried out: names do not tell what a class computes.

    Args:
        model: A model whose Linears are packed.
        packed: The directory that they come from.
        places: Path of each packed Linear in the model -> its name in `packed`.
    """
    for path, module in list(model.named_modules()):
        linears = {name for name, child in module.named_children() if isinstance(child, PackedLinear)}
        name = _joined(path, linears, packed, places)
        if name is None:
            continue
        gate_up, down = packed[name], packed[places[f"{path}.{DOWN}"]]
        assert isinstance(gate_up, PackedLinear)
        assert isinstance(down, PackedLinear)
        activation = None if why_not_fused(gate_up, down) else find_activation(module)
        if activation:
            upper, lower = (
                PackedStack(name, part.spec, dict(part.named_buffers()), part.activation_scales)
                for part in (gate_up, down)
            )
            model.set_submodule(path, PackedMlp(path, upper, lower, activation))


def _joined(path: str, linears: set[str], packed: PackedCheckpoint, places: Mapping[str, str]) -> str | None:
    """The packed Linear that holds gate over up of the module at a path; None if there is none."""
    stored = {name: places.get(f"{path}.{name}", "") for name in linears}
    if linears == _JOINED:
        return stored[GATE_UP] if stored[GATE_UP] in packed.specs else None
    if linears != _APART or stored[GATE] not in packed.joined:
        return None
    name = packed.joined[stored[GATE]]
    return name if packed.specs[name].sources == (stored[GATE], stored[UP]) else None


def find_activation(module: nn.Module) -> str | None:
    """The activation of a gated MLP, see `gated_mlp.find_activation`.

    Args:
        module: One with children `gate_proj` and `up_proj`, or `gate_up_proj`, and `down_proj`.
    """

    def children(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> dict[str, nn.Module]:
        small = {GATE: gate, UP: up, GATE_UP: torch.cat([gate, up]), DOWN: down}
        return {name: _linear(small[name]) for name in small.keys() & module._modules.keys()}

    return gated_mlp.find_activation(module, children)


def _linear(weight: torch.Tensor) -> nn.Linear:
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
