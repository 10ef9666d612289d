"""CPU layouts of 16-bit and FP8 weights: pairs of columns side by side, as bf16 dot products consume them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..formats import WeightFormat
from ..ops.convert import pack_words
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors
from .cpu_blocks import BLOCK_K, check_shape, crop, deinterleave, packed_rows, round_up


@dataclass(frozen=True)
class CpuVnniFloat:
    """Blocks of 32 rows; in each, column pair by column pair, the pairs of the 32 rows.

    `weight` is [.., Np, Kp], Np and Kp being N (each part for itself) and K rounded up to 32, padded with zeros.
    Element (n, k) of a matrix of packed rows is element `(n // 32) * 32 * Kp + (k // 2) * 64 + (n % 32) * 2 + k % 2`;
    row n of part p is packed row `p * Np / parts + n`. Formats with scales keep their scale grid as checkpoints hold
    it: `weight_scale_inv` fp32 [.., parts * ceil(N / parts / 128), ceil(K / 128)].

    Attributes:
        id: Stable name.
        format: Id of the one format that it holds.
        code: dtype of the codes.
        word: Integer of the size of a column pair.
        version: Version of the byte formula.
    """

    id: str
    format: str
    code: torch.dtype
    word: torch.dtype
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Any [N, K] or [E, N, K] of its format."""
        if fmt.id != self.format:
            return Reject(self.id, f"holds {self.format}, not {fmt.id}")
        return check_shape(self.id, shape, parts)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """`weight`, and `weight_scale_inv` for formats with scales."""
        *lead, n, k = shape
        specs = {"weight": TensorSpec(self.code, (*lead, packed_rows(n, parts), round_up(k, BLOCK_K)))}
        if fmt.has_scales:
            grid = (*lead, fmt.scale_rows(n, parts), fmt.scale_columns(k))
            specs["weight_scale_inv"] = TensorSpec(torch.float32, grid)
        return specs

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """Pad, then gather column pairs by block; scales pass unchanged."""
        spec = self.specs(q.format, q.shape, q.parts)["weight"]
        bits = q.codes.contiguous().view(self._bits)  # zeros cannot be written to FP8 tensors everywhere
        tensors = {"weight": pack_words(bits, q.parts, spec.shape[-1], self.word.itemsize).view(self.code)}
        if q.scales is not None:
            tensors["weight_scale_inv"] = q.scales.contiguous()
        return tensors

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        specs = self.specs(fmt, shape, parts)
        check_tensors(self.id, tensors, specs)
        *lead, rows, columns = specs["weight"].shape
        words = tensors["weight"].view(self.word).reshape(*lead, rows // 32, columns // 2, 32)
        codes = crop(deinterleave(words, self._bits), shape[-2], parts, shape[-1])
        return QTensor(fmt, codes.view(self.code), tensors.get("weight_scale_inv"), parts=parts)

    @property
    def _bits(self) -> torch.dtype:
        return torch.int16 if self.code.itemsize == 2 else torch.uint8


CPU_VNNI_BF16 = CpuVnniFloat("cpu-vnni-bf16", "bf16", torch.bfloat16, torch.int32)
CPU_VNNI_FP8 = CpuVnniFloat("cpu-vnni-fp8", "fp8", torch.float8_e4m3fn, torch.int16)
