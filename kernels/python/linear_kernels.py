"""Which bundled kernel multiplies by a weight of which layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from . import ops
from .registry import Registry

Tensors = Mapping[str, torch.Tensor]
Run = Callable[[torch.Tensor, Tensors, int, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class LinearKernel:
    """Multiplies activations by one packed matrix.

    Attributes:
        id: The layout that it reads.
        device: Type of the device that it runs on.
        op: Name of its operator, `torch.ops.tilewright.<op>`.
        run: (x [.., K], tensors by suffix, N, bias fp32 [N] or None) -> [.., N] in the dtype of x.
    """

    id: str
    device: str
    op: str
    run: Run


def _bf16(x: torch.Tensor, t: Tensors, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    return ops.linear_bf16(x, t["weight"], n, bias)


def _int8(x: torch.Tensor, t: Tensors, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    return ops.linear_int8(x, t["weight"], t["weight_scale"], n, bias)


def _fp8(x: torch.Tensor, t: Tensors, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    return ops.linear_fp8(x, t["weight"], t["weight_scale_inv"], n, bias)


def _int4(x: torch.Tensor, t: Tensors, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    return ops.linear_int4(x, t["weight"], t["weight_zero_point"], t["weight_scale"], n, bias)


LINEAR_KERNELS: Registry[LinearKernel] = Registry(
    "linear kernel for layout",
    (
        LinearKernel("cpu-vnni-bf16", "cpu", "linear_bf16", _bf16),
        LinearKernel("cpu-vnni-int8", "cpu", "linear_int8", _int8),
        LinearKernel("cpu-vnni-fp8", "cpu", "linear_fp8", _fp8),
        LinearKernel("cpu-vnni-int4", "cpu", "linear_int4", _int4),
    ),
)
