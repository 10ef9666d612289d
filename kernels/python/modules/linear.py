"""A Linear whose weight is packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..packed.module_spec import ModuleSpec
from .weight import PackedWeight, refuse_gradient


class PackedLinear(PackedWeight):
    """`y = x W^T + b` with a packed `W` [N, K]; `reference.py` states the arithmetic of each layout's operator.

    Attributes:
        reduce: Adds up the results of all ranks, where this one has some of the columns only; None by default.
    """

    def __init__(
        self, name: str, spec: ModuleSpec, tensors: Mapping[str, torch.Tensor], activation_scales: str = "token"
    ) -> None:
        super().__init__(name, spec, tensors, activation_scales)
        self.out_features, self.in_features = spec.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x fp32, bf16 or fp16 [.., K] -> [.., N] in the same dtype."""
        # Decoding calls this hundreds of times a token: buffers are read where nn.Module keeps them, not as attributes.
        y = self.kernel.run(x, self._buffers, self.out_features, self.activation_group, self.rotation)
        if x.requires_grad:
            y = refuse_gradient(y, x)
        return y if self.reduce is None else self.reduce(y)
