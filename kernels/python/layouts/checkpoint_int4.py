"""Checkpoint layouts of symmetric int4 codes, two in a byte: the even column in the low nibble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import LayoutError
from ..formats import INT4_BY_GROUP, INT4_G128, WeightFormat
from ..ops.convert import join_nibbles, split_nibbles
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors

OFFSET_TO_SIGNED = 0x88  # offset-binary nibbles (q + 8) and two's complement ones differ in their top bits


def _reject(layout: str, shape: tuple[int, ...], parts: int, group: int) -> Reject | None:
    if len(shape) != 2 or parts != 1:
        return Reject(layout, f"holds single matrices, not {parts} parts of shape {list(shape)}")
    if shape[1] % group:
        return Reject(layout, f"K = {shape[1]} is not a multiple of group {group}")
    return None


@dataclass(frozen=True)
class W4Afp8Expert:
    """An expert of the native W4AFP8 format.

    `weight` int8 [N, K / 2]: byte (n, j) = (q[n, 2j] & 15) | (q[n, 2j + 1] & 15) << 4, q in two's complement -8..7.
    `weight_scale_inv` fp32 [N, K / 128]: multipliers; engines cast them to bf16.
    """

    id: str = "w4afp8-expert"
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        if fmt != INT4_G128:
            return Reject(self.id, f"holds {INT4_G128.id} codes, not {fmt.id}")
        return _reject(self.id, shape, parts, fmt.block_k)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of every tensor that `pack` gives."""
        n, k = shape
        return {
            "weight": TensorSpec(torch.int8, (n, k // 2)),
            "weight_scale_inv": TensorSpec(torch.float32, (n, k // fmt.block_k)),
        }

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The named tensors."""
        scales = _symmetric_scales(self.id, q)
        weight = join_nibbles(q.codes).bitwise_xor_(OFFSET_TO_SIGNED).view(torch.int8)
        return {"weight": weight, "weight_scale_inv": scales.contiguous()}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        check_tensors(f"layout {self.id}", tensors, self.specs(fmt, shape, parts))
        codes = split_nibbles(tensors["weight"].view(torch.uint8), flip=8)
        return QTensor(fmt, codes, tensors["weight_scale_inv"])


@dataclass(frozen=True)
class PackQuantized:
    """Symmetric int4 of compressed-tensors, format `pack-quantized`.

    `weight_packed` int32 [N, K / 8]: bits 4i..4i+3 of word (n, j) = q[n, 8j + i] + 8.
    `weight_scale` [N, K / group]: multipliers. `weight_shape` int64 [2]: (N, K).

    Attributes:
        id: Stable name of the layout.
        scale_dtype: Type of the scales; bf16 in what Tilewright itself writes.
        version: Version of the byte formula.
    """

    id: str = "pack-quantized"
    scale_dtype: torch.dtype = torch.bfloat16
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        if fmt not in INT4_BY_GROUP.values():
            return Reject(self.id, f"holds int4 codes, not {fmt.id}")
        return _reject(self.id, shape, parts, fmt.block_k)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of every tensor that `pack` gives."""
        n, k = shape
        return {
            "weight_packed": TensorSpec(torch.int32, (n, k // 8)),
            "weight_scale": TensorSpec(self.scale_dtype, (n, k // fmt.block_k)),
            "weight_shape": TensorSpec(torch.int64, (2,)),
        }

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The named tensors.

        Raises:
            LayoutError: A scale is no number of the layout's type, so that storing it would change the weight.
        """
        scales = _symmetric_scales(self.id, q)
        stored = scales.to(self.scale_dtype)
        if not torch.equal(stored.to(torch.float32), scales):
            raise LayoutError(
                f"layout {self.id}: stores {self.scale_dtype} scales, but those of this weight are no such numbers"
            )
        words = join_nibbles(q.codes).view(torch.int32)
        return {"weight_packed": words, "weight_scale": stored, "weight_shape": torch.tensor(q.shape)}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        check_tensors(f"layout {self.id}", tensors, self.specs(fmt, shape, parts))
        stated = tuple(tensors["weight_shape"].tolist())
        if stated != tuple(shape):
            raise LayoutError(f"layout {self.id}: `weight_shape` says {list(stated)}, the weight is {list(shape)}")
        codes = split_nibbles(tensors["weight_packed"].contiguous().view(torch.uint8))
        return QTensor(fmt, codes, tensors["weight_scale"].to(torch.float32))


def _symmetric_scales(layout: str, q: QTensor) -> torch.Tensor:
    if q.zeros is not None:
        raise LayoutError(f"layout {layout}: holds symmetric codes only, this weight has zero points")
    assert q.scales is not None
    return q.scales


W4AFP8_EXPERT = W4Afp8Expert()
PACK_QUANTIZED = PackQuantized()
PACK_QUANTIZED_FP16 = PackQuantized("pack-quantized-fp16", torch.float16)
PACK_QUANTIZED_FP32 = PackQuantized("pack-quantized-fp32", torch.float32)
