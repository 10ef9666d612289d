"""Gated MLPs, dense or of shared experts, run by one operator in the place of five."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import KernelUnavailableError
from ..layouts.cpu_blocks import row_unit
from ..ops.experts import ACTIVATIONS, fused_mlp
from .experts import PackedStack
from .linear import PackedLinear
from .weight import Reduce, refuse_gradient


class PackedMlp(nn.Module):
    """`y = down(act(gate(x)) * up(x))` by `ops.experts.fused_mlp`; `reference_experts.py` states the arithmetic.

    Three Linears would round gate, up, the activation and the product to the dtype of `x`; here the product alone is
    rounded, to bf16.

    Args:
        name: Name of the module, for messages.
        gate_up_proj: Gate and up [2I, H], gate first.
        down_proj: Down [H, I].
        activation: One of `ops.experts.ACTIVATIONS`.

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
        if reason := why_not_fused(gate_up_proj, down_proj):
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
        y = fused_mlp(
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
            activation_group=self.gate_up_proj.activation_group,
            w13_rotation=self.gate_up_proj.rotation,
            w2_rotation=self.down_proj.rotation,
            packing=self.gate_up_proj.kernel.packing,
        )
        if x.requires_grad:
            y = refuse_gradient(y, x)
        return y if self.reduce is None else self.reduce(y)


def why_not_fused(gate_up: PackedStack | PackedLinear, down: PackedStack | PackedLinear) -> str | None:
    """Why one operator cannot run two matrices as an MLP, or None if it can."""
    upper, lower = gate_up.spec, down.spec
    if gate_up.kernel.device != "cpu" or upper.layout is not lower.layout:
        return f"gate and up are in layout `{upper.layout.id}`, down in `{lower.layout.id}`; the CPU kernel needs one"
    if any(upper.leading) or any(lower.leading):
        return "shares that begin inside a block of scales are multiplied one by one"
    if upper.shape != (2 * lower.shape[1], lower.shape[0]):
        return f"gate and up are {list(upper.shape)}, down is {list(lower.shape)}: no MLP"
    if lower.shape[1] % row_unit(upper.format):
        return f"gate of {lower.shape[1]} rows is no whole blocks of {row_unit(upper.format)}"
    return None
