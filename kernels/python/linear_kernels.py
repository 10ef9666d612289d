"""Which bundled kernel multiplies by a weight of which layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import ops
from .gpu.grouped import linear_w4a8
from .registry import Registry


@dataclass(frozen=True)
class LinearKernel:
    """Multiplies activations by one packed matrix.

    Attributes:
        id: The layout that it reads.
        device: Type of the device that it runs on.
        suffixes: The layout's tensors, in the order in which the operator takes them.
        op: The operator: (x [.., K], *tensors, N, bias fp32 [N] or None) -> [.., N] in the dtype of x.
    """

    id: str
    device: str
    suffixes: tuple[str, ...]
    op: Callable[..., torch.Tensor]

    def run(
        self, x: torch.Tensor, tensors: Sequence[torch.Tensor], n: int, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x W^T + bias` for a matrix of `n` rows whose tensors are in the order of `suffixes`."""
        return self.op(x, *tensors, n, bias)


LINEAR_KERNELS: Registry[LinearKernel] = Registry(
    "linear kernel for layout",
    (
        LinearKernel("cpu-vnni-bf16", "cpu", ("weight",), ops.linear_bf16),
        LinearKernel("cpu-vnni-int8", "cpu", ("weight", "weight_scale"), ops.linear_int8),
        LinearKernel("cpu-vnni-fp8", "cpu", ("weight", "weight_scale_inv"), ops.linear_fp8),
        LinearKernel("cpu-vnni-int4", "cpu", ("weight", "weight_zero_point", "weight_scale"), ops.linear_int4),
        LinearKernel("gpu-hopper-w4", "cuda", ("tiles", "scales"), linear_w4a8),
    ),
)
