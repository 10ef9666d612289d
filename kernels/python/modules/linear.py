"""A Linear whose weight is packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

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
        self._is_whole = not any(spec.leading)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x fp32, bf16 or fp16 [.., K] -> [.., N] in the same dtype."""
        # Decoding calls this hundreds of times a token: buffers are read where nn.Module keeps them, not as attributes.
        if self._is_whole:
            y = self.kernel.run(x, self._buffers, self.out_features, self.activation_group, self.rotation)
        else:
            y = self._run_share(x)
        if x.requires_grad:
            y = refuse_gradient(y, x)
        return y if self.reduce is None else self.reduce(y)

    def _run_share(self, x: torch.Tensor) -> torch.Tensor:
        """The same where zeros are stored before the share: `x` gets columns for them, `y` goes without their rows."""
        rows, columns = self.spec.leading
        x = functional.pad(x, (columns, 0)) if columns else x
        y = self.kernel.run(x, self._buffers, self.spec.stored[0], self.activation_group, self.rotation)
        return y[..., rows:].contiguous() if rows else y
