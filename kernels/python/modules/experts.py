"""The routed experts of one layer, whose stacks of matrices are packed."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import KernelUnavailableError
from ..ops.experts import ACTIVATIONS, fused_experts, fused_mlp
from ..packed.module_spec import Gating
from .weight import PackedWeight, Reduce, refuse_gradient


class PackedStack(PackedWeight):
    """Packed matrices that are multiplied within a larger operator.

    A stack [E, N, K] of `PackedExperts` or `GpuExperts`, a single one [N, K] of `PackedMlp`.
    """

    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Weight, scale, zero points and bias as `fused_experts` takes them; None where the format has none."""
        find = self._buffers.get
        weight = find("weight")
        assert weight is not None
        return weight, find(self.kernel.scale), find("weight_zero_point"), find("bias")

    @property
    def operator(self) -> str:
        """One operator for all kinds of weights."""
        return fused_mlp.__name__ if len(self.spec.shape) == 2 else self.kernel.experts().operator


class PackedExperts(nn.Module):
    """The routed experts of one layer; `reference_experts.fused_experts` states what they compute.

    Args:
        name: Name of the module, for messages.
        w13: Gate and up [E, 2I, H], parts 2, gate first.
        w2: Down [E, H, I].
        activation: One of `ops.experts.ACTIVATIONS`.
        alpha: Slope of `clamped_swiglu`.
        limit: Bound of `clamped_swiglu`.

    Attributes:
        reduce: Adds up the results of all ranks, where this one has some of the experts or columns; None by default.

    Raises:
        KernelUnavailableError: The activation is unknown, or the stacks are of different kinds.
    """

    operator = fused_experts.__name__

    def __init__(
        self,
        name: str,
        w13: PackedStack,
        w2: PackedStack,
        activation: str = "silu",
        alpha: float = Gating.alpha,
        limit: float = Gating.limit,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise KernelUnavailableError(f"{name}: unknown activation `{activation}`; known are {known}")
        if w13.kernel is not w2.kernel:
            layouts = f"w13 is in layout `{w13.kernel.id}`, w2 in `{w2.kernel.id}`"
            raise KernelUnavailableError(f"{name}: {layouts}, the kernel needs one for both")
        if w13.spec.leading[0] != w2.spec.leading[1]:
            reason = f"{w13.spec.leading[0]} rows of zeros before w13 and {w2.spec.leading[1]} columns before w2"
            raise KernelUnavailableError(f"{name}: {reason}: their shares do not fit together")
        self.w13 = w13
        self.w2 = w2
        self.activation = activation
        self.alpha = alpha
        self.limit = limit
        self.reduce: Reduce | None = None

    @classmethod
    def of(
        cls,
        name: str,
        w13: PackedStack,
        w2: PackedStack,
        gating: Gating,
        input_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> PackedExperts:
        """What `build_experts` makes; on CPUs activations are scaled as they come, whatever `input_scales` says."""
        return cls(name, w13, w2, gating.activation, gating.alpha, gating.limit)

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation}"

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Run every token through its experts.

        Args:
            x: Activations [T, H].
            top_k_index: Expert numbers, integers [T, k]; one outside of this stack (such as -1) contributes nothing.
            top_k_weights: Routing weights [T, k].

        Returns:
            [T, H] in the dtype of `x`.
        """
        w13, w2 = self.w13, self.w2
        (weight13, scale13, zeros13, bias13), (weight2, scale2, zeros2, bias2) = w13.operands(), w2.operands()
        y = fused_experts(
            x,
            top_k_weights.float().contiguous(),
            top_k_index.contiguous(),
            weight13,
            weight2,
            w2.spec.stored[-1],
            w13_scale=scale13,
            w2_scale=scale2,
            w13_zeros=zeros13,
            w2_zeros=zeros2,
            w13_bias=bias13,
            w2_bias=bias2,
            activation=self.activation,
            alpha=self.alpha,
            limit=self.limit,
            first_expert=w13.spec.first_expert,
            activation_group=w13.activation_group,
            w13_rotation=w13.rotation,
            w2_rotation=w2.rotation,
            packing=w13.kernel.packing,
        )
        if x.requires_grad:
            y = refuse_gradient(y, x)
        return y if self.reduce is None else self.reduce(y)
