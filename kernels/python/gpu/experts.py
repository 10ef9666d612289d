"""The routed experts of one layer on a GPU."""

from __future__ import annotations

import torch

from ..errors import KernelUnavailableError
from ..modules.experts import PackedExperts, PackedStack
from ..packed.module_spec import Gating
from .moe import w4a8_fused_experts


class GpuExperts(PackedExperts):
    """The routed experts of one layer, in layout `gpu-hopper-w4`; `reference.fused_experts` states what they compute.

    Args:
        name: Name of the module, for messages.
        w13: Gate and up [E, 2I, H], parts 2, gate first.
        w2: Down [E, H, I].
        activation: "silu".
        input_scales: fp32 [1] each, static scales of the FP8 activations multiplied by w13 and by w2; by default
            every row is scaled by its own magnitude.

    Raises:
        KernelUnavailableError: Another activation, or experts with a bias.
    """

    operator = w4a8_fused_experts.__name__
    input_scale13: torch.Tensor | None
    input_scale2: torch.Tensor | None

    def __init__(
        self,
        name: str,
        w13: PackedStack,
        w2: PackedStack,
        activation: str = "silu",
        input_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(name, w13, w2, activation)
        if activation != "silu" or w13.bias is not None or w2.bias is not None:
            reason = f"activation `{activation}`" if activation != "silu" else "experts with a bias"
            raise KernelUnavailableError(f"{name}: no kernel for GPUs computes {reason}")
        first, second = input_scales or (None, None)
        self.register_buffer("input_scale13", first, persistent=False)
        self.register_buffer("input_scale2", second, persistent=False)

    @classmethod
    def of(
        cls,
        name: str,
        w13: PackedStack,
        w2: PackedStack,
        gating: Gating,
        input_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> GpuExperts:
        """See `PackedExperts.of`."""
        return cls(name, w13, w2, gating.activation, input_scales)

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Run every token through its experts; operands as for `PackedExperts`."""
        tiles13, scales13 = self.w13.tensors()
        tiles2, scales2 = self.w2.tensors()
        y = w4a8_fused_experts(
            x.to(torch.bfloat16).contiguous(),
            tiles13,
            scales13,
            tiles2,
            scales2,
            top_k_weights.to(torch.float32),
            top_k_index - self.w13.spec.first_expert,
            "token" if self.input_scale13 is None else "static",
            self.input_scale13,
            self.input_scale2,
            self.w13.spec.format.block_k,
            self.w13.spec.whole[0] if self.w13.spec.whole else 0,
        ).to(x.dtype)
        return y if self.reduce is None else self.reduce(y)
