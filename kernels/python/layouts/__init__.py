"""Every layout, one visible line each."""

from __future__ import annotations

from ..registry import Registry
from .base import Layout
from .checkpoint_int4 import PACK_QUANTIZED, PACK_QUANTIZED_FP16, PACK_QUANTIZED_FP32, W4AFP8_EXPERT
from .checkpoint_mxfp4 import MXFP4_BLOCKS, MXFP4_DEEPSEEK, MXFP4_PACKED
from .checkpoint_scaled import BLOCK_FP8, BLOCK_FP8_CT, CONV1D_BF16, INT8_CHANNEL, PLAIN_BF16
from .checkpoint_zero_points import ZERO_POINTS
from .cpu_float import CPU_VNNI_BF16, CPU_VNNI_FP8
from .cpu_int4 import CPU_VNNI_INT4
from .cpu_int4_compact import CPU_INT4_COMPACT
from .cpu_int8 import CPU_VNNI_INT8
from .cpu_mxfp4 import CPU_MXFP4
from .gpu_cutlass import GPU_CUTLASS_W4, GPU_TRTLLM_W4
from .gpu_hopper import GPU_HOPPER_W4

LAYOUTS: Registry[Layout] = Registry(
    "layout",
    (
        PLAIN_BF16,
        CONV1D_BF16,
        BLOCK_FP8,
        BLOCK_FP8_CT,
        INT8_CHANNEL,
        W4AFP8_EXPERT,
        PACK_QUANTIZED,
        PACK_QUANTIZED_FP16,
        PACK_QUANTIZED_FP32,
        *ZERO_POINTS,
        MXFP4_PACKED,
        MXFP4_BLOCKS,
        MXFP4_DEEPSEEK,
        CPU_VNNI_BF16,
        CPU_VNNI_INT8,
        CPU_VNNI_FP8,
        CPU_VNNI_INT4,
        CPU_MXFP4,
        CPU_INT4_COMPACT,
        GPU_CUTLASS_W4,
        GPU_TRTLLM_W4,
        GPU_HOPPER_W4,
    ),
)
