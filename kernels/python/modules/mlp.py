"""Gated MLPs, dense or of shared experts, run by one operator in the place of five."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ..errors import KernelUnavailableError
from ..layouts.cpu_blocks import row_unit
from ..model_names import DOWN, GATE, GATE_UP, UP
from ..ops.experts import ACTIVATIONS, shared_expert
from ..packed.directory import PackedCheckpoint
from .packed_modules import PackedLinear, PackedStack, Reduce, refuse_gradient

_APART, _JOINED = {GATE, UP, DOWN}, {GATE_UP, DOWN}
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class PackedMlp(nn.Module):
    """`y = down(act(gate(x)) * up(x))` by `ops_experts.shared_expert`; `reference_experts.py` states the arithmetic.

    Three Linears would round gate, up, the activation and the product to the dtype of `x`; here the product alone is
    rounded, to bf16.

    Args:
        name: Name of the module, for messages.
        gate_up_proj: Gate and up [2I, H], gate first.
        down_proj: Down [H, I].
        activation: One of `ops_experts.ACTIVATIONS`.

    Attributes:
        reduce: Adds up the results of all ranks, where this one has some of the inner columns only; None by default.

    Raises:
        KernelUnavailableError: The activation is unknown, or the operator cannot take the two together.
    """

    def __init__(self, name: str, gate_up_proj: PackedStack, down_proj: PackedStack, activation: str = "silu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise KernelUnavailableError(f"{name}: unknown activation `{activation}`; known are {known}")
        if reason := against_fusing(gate_up_proj, down_proj):
            raise KernelUnavailableError(f"{name}: {reason}")
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation
        self.inner = down_proj.spec.shape[1]
        self.reduce: Reduce | None = None

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run every token through it: x fp32, bf16 or fp16 [.., H] -> the same."""
        weight13, scale13, zeros13, bias13 = self.gate_up_proj.operands()
        weight2, scale2, zeros2, bias2 = self.down_proj.operands()
        y = shared_expert(
            x,
            weight13,
            weight2,
            self.inner,
            scale13,
            scale2,
            zeros13,
            zeros2,
            bias13,
            bias2,
            activation=self.activation,
        )
        if x.requires_grad:
            y = refuse_gradient(y, x)
        return y if self.reduce is None else self.reduce(y)


def against_fusing(gate_up: PackedStack | PackedLinear, down: PackedStack | PackedLinear) -> str | None:
    """Why one operator cannot run two matrices as an MLP, or None if it can."""
    upper, lower = gate_up.spec, down.spec
    if gate_up.kernel.device != "cpu" or upper.layout is not lower.layout:
        return f"gate and up are in layout `{upper.layout.id}`, down in `{lower.layout.id}`; the CPU kernel needs one"
    if upper.shape != (2 * lower.shape[1], lower.shape[0]):
        return f"gate and up are {list(upper.shape)}, down is {list(lower.shape)}: no MLP"
    if lower.shape[1] % row_unit(upper.format):
        return f"gate of {lower.shape[1]} rows is no whole blocks of {row_unit(upper.format)}"
    return None


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
        activation = None if against_fusing(gate_up, down) else find_activation(module)
        if activation:
            upper, lower = (PackedStack(name, part.spec, dict(part.named_buffers())) for part in (gate_up, down))
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
