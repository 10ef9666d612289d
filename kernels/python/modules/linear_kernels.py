"""Which bundled kernel multiplies by a weight of which layout."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import ops
from ..formats import WeightFormat
from ..layouts import LAYOUTS
from ..registry import Registry


@dataclass(frozen=True)
class LinearKernel:
    """Multiplies activations by one packed matrix.

    Attributes:
        id: The layout that it reads.
        device: Type of the device that it runs on.
        suffixes: The layout's tensors, in the order in which the operator takes them.
        op: The operator: (x [.., K], *tensors, N, bias fp32 [N] or None) -> [.., N] in the dtype of x.
        source: Where to find the operator if it is imported only when a module is built for it: "module:name".
        experts_source: Where to find the class of routed experts whose stacks are in this layout.
        quantizes: Whether it rounds activations to int8, scaled and rotated as its options `activation_group` and
            `rotation` say.
        packing: What operators over experts call this layout, where the type of its weights does not tell.
        scale: Suffix of its scales; "" if it has none. A field, because Dynamo cannot trace a cached property.
    """

    id: str
    device: str
    suffixes: tuple[str, ...]
    op: Callable[..., torch.Tensor]
    source: str = ""
    experts_source: str = "modules.experts:PackedExperts"
    quantizes: bool = False
    packing: str = ""
    scale: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", next((suffix for suffix in self.suffixes if "scale" in suffix), ""))

    def loaded(self) -> LinearKernel:
        """The same with its operator imported, which for GPUs brings Triton with it."""
        return _load(self) if self.source else self

    def experts(self) -> Any:
        """The class of routed experts whose stacks are in this layout."""
        return _find(self.experts_source)

    def run(
        self,
        x: torch.Tensor,
        tensors: Mapping[str, torch.Tensor | None],
        n: int,
        activation_group: int = 0,
        rotation: int = 0,
    ) -> torch.Tensor:
        """`x W^T + bias` for a matrix of `n` rows, whose tensors and `bias` are found by their suffixes."""
        given = map(tensors.__getitem__, self.suffixes)
        if activation_group or rotation:
            return self.op(x, *given, n, tensors["bias"], activation_group=activation_group, rotation=rotation)
        return self.op(x, *given, n, tensors["bias"])


def _find(source: str) -> Any:
    module, _, name = source.partition(":")
    return getattr(importlib.import_module(f"tilewright.kernels.{module}"), name)


@functools.cache
def _load(kernel: LinearKernel) -> LinearKernel:
    return replace(kernel, op=_find(kernel.source), source="")


def _not_loaded(*_: object) -> torch.Tensor:
    raise AssertionError("find_kernel gives kernels that are loaded")


LINEAR_KERNELS: Registry[LinearKernel] = Registry(
    "linear kernel for layout",
    (
        LinearKernel("cpu-vnni-bf16", "cpu", ("weight",), ops.linear_bf16),
        LinearKernel("cpu-vnni-int8", "cpu", ("weight", "weight_scale"), ops.linear_int8, quantizes=True),
        LinearKernel("cpu-vnni-fp8", "cpu", ("weight", "weight_scale_inv"), ops.linear_fp8),
        LinearKernel(
            "cpu-vnni-int4",
            "cpu",
            ("weight", "weight_zero_point", "weight_scale"),
            ops.linear_int4,
            quantizes=True,
        ),
        LinearKernel(
            "cpu-int4-compact",
            "cpu",
            ("weight",),
            ops.linear_int4_compact,
            quantizes=True,
            packing="int4-compact",
        ),
        LinearKernel("cpu-mxfp4", "cpu", ("weight",), ops.linear_mxfp4, packing="mxfp4"),
        LinearKernel(
            "gpu-hopper-w4",
            "cuda",
            ("tiles", "scales"),
            _not_loaded,
            source="gpu.grouped:linear_w4a8",
            experts_source="gpu.experts:GpuExperts",
        ),
    ),
)


def rounds_activations(fmt: WeightFormat) -> bool:
    """Whether a kernel that multiplies by weights of this format rounds activations to int8."""
    return any(
        kernel.quantizes and LAYOUTS[kernel.id].accepts(fmt, (256, 256)) is None for kernel in LINEAR_KERNELS.values()
    )
