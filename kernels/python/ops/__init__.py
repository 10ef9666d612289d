"""The operators of packed layers, as `torch.ops.tilewright.*` and as typed functions.

`reference` and `reference_experts` state what each computes; `convert` has those of conversion.
"""

from .._native import IsaStatus, isa, kernel_report, release_scratch, select_isa
from .attention import attend
from .experts import fused_experts, fused_mlp
from .linear import bmm, linear_bf16, linear_fp8, linear_int4, linear_int4_compact, linear_int8, linear_mxfp4

__all__ = [
    "IsaStatus",
    "attend",
    "bmm",
    "fused_experts",
    "isa",
    "kernel_report",
    "linear_bf16",
    "linear_fp8",
    "linear_int4",
    "linear_int4_compact",
    "linear_int8",
    "linear_mxfp4",
    "release_scratch",
    "select_isa",
    "fused_mlp",
]
