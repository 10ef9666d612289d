"""Every layout, one visible line each."""

from __future__ import annotations

from ..registry import Registry
from .base import Layout
from .gpu_cutlass import GPU_CUTLASS_W4, GPU_TRTLLM_W4
from .gpu_hopper import GPU_HOPPER_W4

LAYOUTS: Registry[Layout] = Registry(
    "layout",
    (
        GPU_CUTLASS_W4,
        GPU_TRTLLM_W4,
        GPU_HOPPER_W4,
    ),
)
