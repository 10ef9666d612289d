"""Checkpoint layouts that store one element per code beside a tensor of scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..formats import BF16, FP8, INT8, WeightFormat
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors


@dataclass(frozen=True)
class ScaledCodes:
    """`weight` = codes [N, K], `<scale>` = fp32 multipliers [scale_rows, scale_columns]; nothing is padded.

    Attributes:
        id: Stable name of the layout.
        fmt: The only weight format that it holds.
        scale: Name of the scale tensor; empty for formats without scales.
        version: Version of the byte formula.
    """

    id: str
    fmt: WeightFormat
    scale: str
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        if fmt != self.fmt:
            return Reject(self.id, f"holds {self.fmt.id} codes, not {fmt.id}")
        if len(shape) != 2 or parts != 1:
            return Reject(self.id, f"holds single matrices, not {parts} parts of shape {list(shape)}")
        return None

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of every tensor that `pack` gives."""
        n, k = shape
        specs = {"weight": TensorSpec(fmt.code_dtype, (n, k))}
        if self.scale:
            specs[self.scale] = TensorSpec(torch.float32, (fmt.scale_rows(n, parts), fmt.scale_columns(k)))
        return specs

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The named tensors."""
        tensors = {"weight": q.codes.contiguous()}
        if q.scales is not None:
            tensors[self.scale] = q.scales.contiguous()
        return tensors

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        check_tensors(f"layout {self.id}", tensors, self.specs(fmt, shape, parts))
        return QTensor(fmt, tensors["weight"], tensors[self.scale] if self.scale else None)


@dataclass(frozen=True)
class TransposedValues:
    """`weight` = values [K, N]: a Linear as `Conv1D` of transformers stores it, which GPT-2 uses.

    Attributes:
        id: Stable name of the layout.
        fmt: The only weight format that it holds, one without scales.
        version: Version of the byte formula.
    """

    id: str
    fmt: WeightFormat
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        return ScaledCodes(self.id, self.fmt, "").accepts(fmt, shape, parts)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of every tensor that `pack` gives."""
        return {"weight": TensorSpec(fmt.code_dtype, (shape[1], shape[0]))}

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The named tensor."""
        return {"weight": q.codes.T.contiguous()}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        check_tensors(f"layout {self.id}", tensors, self.specs(fmt, shape, parts))
        return QTensor(fmt, tensors["weight"].T.contiguous())


PLAIN_BF16 = ScaledCodes("plain-bf16", BF16, "")
CONV1D_BF16 = TransposedValues("conv1d-bf16", BF16)
BLOCK_FP8 = ScaledCodes("block-fp8", FP8, "weight_scale_inv")  # quant_method fp8; a multiplier despite its name
BLOCK_FP8_CT = ScaledCodes("block-fp8-ct", FP8, "weight_scale")  # compressed-tensors float-quantized, block strategy
INT8_CHANNEL = ScaledCodes("int8-channel", INT8, "weight_scale")  # w8a8_int8 and compressed-tensors int-quantized
