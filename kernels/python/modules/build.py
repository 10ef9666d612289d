"""Packed modules out of what a file says about them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..packed.module_spec import Gating, ModuleSpec
from .experts import PackedExperts, PackedStack
from .linear import PackedLinear


def build_module(
    name: str, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor], activation_scales: str = "token"
) -> PackedLinear | PackedStack:
    """The module that runs a packed weight: `PackedLinear` for [N, K], `PackedStack` for [E, N, K]."""
    kind = PackedLinear if len(spec.shape) == 2 else PackedStack
    return kind(name, spec, tensors, activation_scales)


def build_experts(
    name: str,
    w13: PackedStack,
    w2: PackedStack,
    gating: Gating,
    input_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> PackedExperts:
    """The routed experts of one layer, of the class that the kernel table names for their layout.

    Args:
        name: Name of the module, for messages.
        w13: Gate and up [E, 2I, H], parts 2, gate first.
        w2: Down [E, H, I].
        gating: What is computed between the two products.
        input_scales: fp32 [1] each, static scales of FP8 activations multiplied by w13 and by w2; None for none.

    Raises:
        KernelUnavailableError: No kernel computes it.
    """
    experts: PackedExperts = w13.kernel.experts().of(name, w13, w2, gating, input_scales)
    return experts
