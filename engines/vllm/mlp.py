"""Gated MLPs of vLLM's models, dense or of shared experts, run by one operator in the place of three."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_reduce

from tilewright.kernels.model_names import DOWN, GATE_UP
from tilewright.kernels.modules import PackedLinear, PackedStack
from tilewright.kernels.modules.mlp import PackedMlp, why_not_fused

from .. import gated_mlp
from .linear import PackedLinearMethod

_CHILDREN = {GATE_UP, "act_fn", DOWN}


def replace_mlps(model: nn.Module) -> None:
    """Let `PackedMlp` run the MLPs of a model whose gate and up are packed as one.

    Which modules are such MLPs, and with which activation, is tried out: names do not tell what a class computes.
    """
    made: dict[nn.Module, PackedMlp | None] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if {name for name, _ in module.named_children()} != _CHILDREN:
            continue
        if module not in made:
            made[module] = _fused(path, module)
        if mlp := made[module]:
            model.set_submodule(path, mlp)


def _fused(path: str, module: Any) -> PackedMlp | None:
    gate_up, down = _only(module.gate_up_proj), _only(module.down_proj)
    if gate_up is None or down is None or why_not_fused(gate_up, down):
        return None
    activation = find_activation(module)
    if activation is None:
        return None
    upper, lower = (
        PackedStack(path, part.spec, dict(part.named_buffers()), part.activation_scales) for part in (gate_up, down)
    )
    mlp = PackedMlp(path, upper, lower, activation)
    if module.down_proj.reduce_results and module.down_proj.tp_size > 1:
        mlp.reduce = tensor_model_parallel_all_reduce
    return mlp


def _only(layer: Any) -> PackedLinear | None:
    """The packed Linear that runs a layer alone."""
    method = getattr(layer, "quant_method", None)
    return method.modules[0] if isinstance(method, PackedLinearMethod) and len(method.modules) == 1 else None


class _Small(nn.Module):
    """A small Linear that is called as vLLM's are."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return functional.linear(x, self.weight), None


class _Native(nn.Module):
    """An activation of vLLM's by its plain definition."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Any:
        return self.activation.forward_native(x)


def find_activation(module: Any) -> str | None:
    """The activation of a gated MLP, see `gated_mlp.find_activation`.

    Args:
        module: One of vLLM's with children `gate_up_proj`, `act_fn` and `down_proj`.
    """
    if not hasattr(module.act_fn, "forward_native"):
        return None

    def children(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, nn.Module]:
        return {
            GATE_UP: _Small(torch.cat([gate, up])),
            "act_fn": _Native(module.act_fn),
            DOWN: _Small(down),
        }

    return gated_mlp.find_activation(module, children)
