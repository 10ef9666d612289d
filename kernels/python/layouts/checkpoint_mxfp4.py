"""Checkpoint layouts of MXFP4: two codes in a byte, the even column in the low nibble, beside scales of a byte each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..formats import MXFP4, WeightFormat
from ..formats.mxfp4 import from_e8m0, to_e8m0
from ..ops.convert import join_nibbles, split_nibbles
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors


@dataclass(frozen=True)
class CheckpointMxfp4:
    """`<codes>` of K / 2 bytes for each row and `<scale>` [N, K / 32], E8M0: `2^(byte - 127)`.

    Byte (n, j) of the codes = code[n, 2j] | code[n, 2j + 1] << 4, code = sign << 3 | magnitude.

    Attributes:
        id: Stable name of the layout.
        codes: Suffix of the codes.
        scale: Suffix of the scales.
        code_dtype: Of the stored codes.
        scale_dtype: Of the stored scales.
        by_group: The 16 bytes of each group are a dimension of their own: [N, K / 32, 16] instead of [N, K / 2].
        version: Version of the byte formula.
    """

    id: str
    codes: str
    scale: str
    code_dtype: torch.dtype = torch.uint8
    scale_dtype: torch.dtype = torch.uint8
    by_group: bool = False
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        if fmt != MXFP4:
            return Reject(self.id, f"holds {MXFP4.id} codes, not {fmt.id}")
        if len(shape) != 2 or parts != 1:
            return Reject(self.id, f"holds single matrices, not {parts} parts of shape {list(shape)}")
        if shape[1] % fmt.block_k:
            return Reject(self.id, f"K = {shape[1]} is not a multiple of group {fmt.block_k}")
        return None

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of every tensor that `pack` gives."""
        n, k = shape
        groups = k // fmt.block_k
        codes = (n, groups, fmt.block_k // 2) if self.by_group else (n, k // 2)
        return {self.codes: TensorSpec(self.code_dtype, codes), self.scale: TensorSpec(self.scale_dtype, (n, groups))}

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The named tensors."""
        assert q.scales is not None
        specs = self.specs(q.format, q.shape)
        codes = join_nibbles(q.codes).view(self.code_dtype).reshape(specs[self.codes].shape)
        return {self.codes: codes, self.scale: to_e8m0(q.scales).view(self.scale_dtype)}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        check_tensors(f"layout {self.id}", tensors, self.specs(fmt, shape, parts))
        codes = split_nibbles(tensors[self.codes].contiguous().view(torch.uint8).flatten(1))
        return QTensor(fmt, codes, from_e8m0(tensors[self.scale]))


MXFP4_PACKED = CheckpointMxfp4("mxfp4-pack-quantized", "weight_packed", "weight_scale")
MXFP4_BLOCKS = CheckpointMxfp4("mxfp4-blocks", "blocks", "scales", by_group=True)
MXFP4_DEEPSEEK = CheckpointMxfp4("mxfp4-deepseek", "weight", "scale", torch.int8, torch.float8_e8m0fnu)
