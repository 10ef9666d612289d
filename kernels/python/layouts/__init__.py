"""Every layout, one visible line each."""

from __future__ import annotations

from ..registry import Registry
from .base import Layout
from .cpu_float import CPU_VNNI_BF16, CPU_VNNI_FP8
from .cpu_int4 import CPU_VNNI_INT4
from .cpu_int8 import CPU_VNNI_INT8
from .gpu_cutlass import GPU_CUTLASS_W4, GPU_TRTLLM_W4
from .gpu_hopper import GPU_HOPPER_W4

LAYOUTS: Registry[Layout] = Registry(
    "layout",
    (
        CPU_VNNI_BF16,
        CPU_VNNI_INT8,
        CPU_VNNI_FP8,
        CPU_VNNI_INT4,
        GPU_CUTLASS_W4,
        GPU_TRTLLM_W4,
        GPU_HOPPER_W4,
    ),
)
