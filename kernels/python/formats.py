"""What the numbers of a quantized weight mean, whatever bytes they lie in.

A `WeightFormat` is the meeting point of schemes (which choose numbers) and layouts (which choose bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .registry import Registry


@dataclass(frozen=True)
class WeightFormat:
    """Number format of a weight `[N, K]`: one code per element, one scale per block.

    value[n, k] = (code[n, k] - zero[n, k // block_k]) * scale[n // block_n, k // block_k]

    Attributes:
        id: Stable name, written into packed files.
        bits: Bits per code on disk.
        code_dtype: torch dtype of `QTensor.codes` (one element per code, also for 4 bits).
        qmax: Largest magnitude that a symmetric quantizer aims the block maximum at; 0 for formats without scales.
        block_n: Rows that share a scale; 0 for formats without scales.
        block_k: Columns that share a scale; 0 means the whole row.
        zero_point: Code of the value 0; codes are unsigned around it where it is not 0.
    """

    id: str
    bits: int
    code_dtype: torch.dtype
    qmax: float = 0.0
    block_n: int = 0
    block_k: int = 0
    zero_point: int = 0

    @property
    def has_scales(self) -> bool:
        """Whether codes need scales to become values."""
        return self.block_n > 0

    def scale_rows(self, n: int, parts: int = 1) -> int:
        """Number of scale rows of a weight of `n` rows made of `parts` equal parts, each with a grid of its own."""
        assert n % parts == 0
        return parts * -(-(n // parts) // self.block_n)

    def scale_columns(self, k: int) -> int:
        """Number of scale columns of a weight of `k` columns."""
        return -(-k // self.block_k) if self.block_k else 1


BF16 = WeightFormat("bf16", 16, torch.bfloat16)
INT8 = WeightFormat("int8", 8, torch.int8, qmax=127.0, block_n=1)
FP8 = WeightFormat("fp8", 8, torch.float8_e4m3fn, qmax=448.0, block_n=128, block_k=128)
INT4_G32 = WeightFormat("int4-g32", 4, torch.uint8, qmax=7.0, block_n=1, block_k=32, zero_point=8)
INT4_G64 = WeightFormat("int4-g64", 4, torch.uint8, qmax=7.0, block_n=1, block_k=64, zero_point=8)
INT4_G128 = WeightFormat("int4-g128", 4, torch.uint8, qmax=7.0, block_n=1, block_k=128, zero_point=8)

FORMATS: Registry[WeightFormat] = Registry("weight format", (BF16, INT8, FP8, INT4_G32, INT4_G64, INT4_G128))
INT4_BY_GROUP = {32: INT4_G32, 64: INT4_G64, 128: INT4_G128}
