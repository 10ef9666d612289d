"""Routed experts in int4 groups of 128, run with FP8 activations.

Native: every other Linear is block FP8, and engines read no list of exceptions. compressed-tensors: every other Linear
stays in bf16, which is what both vLLM and SGLang load.
"""

from __future__ import annotations

from tilewright.packer.quant_config import compressed_tensors, w4afp8

from .block_fp8 import NATIVE as BLOCK_FP8
from .scheme import CheckpointFormat, Scheme, StorageSpec

W4AFP8 = Scheme(
    id="w4afp8",
    checkpoint_formats={
        "native": CheckpointFormat(
            BLOCK_FP8,
            StorageSpec("int4-g128", "w4afp8-expert"),
            w4afp8.write,
            ignores_exclusions=True,
            input_scale=True,
            extra_files=w4afp8.extra_files,
        ),
        "compressed-tensors": CheckpointFormat(
            None, StorageSpec("int4-g128", "pack-quantized"), compressed_tensors.write_w4afp8
        ),
    },
    solver="mse",
    groups=(128,),
)
