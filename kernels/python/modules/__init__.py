"""Modules whose weights are packed tensors, used as they lie in the file."""

from .build import build_experts, build_module
from .experts import PackedExperts, PackedStack
from .linear import PackedLinear
from .mlp import PackedMlp
from .report import KernelUse, report_kernels
from .weight import PackedWeight, find_kernel, refuse_gradient

__all__ = [
    "KernelUse",
    "PackedExperts",
    "PackedLinear",
    "PackedMlp",
    "PackedStack",
    "PackedWeight",
    "build_experts",
    "build_module",
    "find_kernel",
    "refuse_gradient",
    "report_kernels",
]
