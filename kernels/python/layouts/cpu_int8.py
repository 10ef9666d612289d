"""CPU layout of INT8 weights: four columns side by side, and what turns signed activations into unsigned ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import LayoutError
from ..formats import WeightFormat
from ..ops.convert import pack_words
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors
from .cpu_blocks import BLOCK_K, check_shape, crop, deinterleave, packed_rows, pad, round_up

MAX_K = 65_536  # the sum of K products of uint8 and int8 must fit int32


@dataclass(frozen=True)
class CpuVnniInt8:
    """Blocks of 32 rows: four columns of each row at a time, then the compensation of the 32 rows.

    `weight` is int8 [.., Np, Kp + 4], Np and Kp being N (each part for itself) and K rounded up to 32, padded with
    zeros. Element (n, k) of a matrix of packed rows is byte `block + (k // 4) * 128 + (n % 32) * 4 + k % 4` with
    `block = (n // 32) * 32 * (Kp + 4)`; the compensation of row n, `128 * sum_k code[n, k]`, is the little-endian int32
    at byte `block + 32 * Kp + (n % 32) * 4`. A kernel computes `sum_k (a + 128) * code - compensation` with unsigned
    `a + 128`. `weight_scale` is fp32 [.., Np, 1], 0 for padded rows.
    """

    id: str = "cpu-vnni-int8"
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Any [N, K] or [E, N, K] of INT8 codes with one scale a row, K <= 65536."""
        if fmt.id != "int8":
            return Reject(self.id, f"holds int8, not {fmt.id}")
        if shape[-1] > MAX_K:
            return Reject(self.id, f"K = {shape[-1]} is more than {MAX_K}, and sums of products would not fit 32 bits")
        return check_shape(self.id, shape, parts)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """`weight` and `weight_scale`."""
        *lead, n, k = shape
        rows = packed_rows(n, parts)
        return {
            "weight": TensorSpec(torch.int8, (*lead, rows, round_up(k, BLOCK_K) + 4)),
            "weight_scale": TensorSpec(torch.float32, (*lead, rows, 1)),
        }

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """Pad, gather four columns at a time by block, append the compensation as one more word a row."""
        assert q.scales is not None
        spec = self.specs(q.format, q.shape, q.parts)["weight"]
        weight = pack_words(q.codes, q.parts, spec.shape[-1] - 4, 4, compensation=True)
        return {"weight": weight, "weight_scale": pad(q.scales, q.parts, 1)}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`; a compensation that does not fit its row is refused."""
        specs = self.specs(fmt, shape, parts)
        check_tensors(self.id, tensors, specs)
        *lead, rows, columns = specs["weight"].shape
        *_, n, k = shape
        words = tensors["weight"].view(torch.int32).reshape(*lead, rows // 32, columns // 4, 32)
        codes = crop(deinterleave(words[..., :-1, :], torch.int8), n, parts, k)
        compensation = crop(words[..., -1:, :].reshape(*lead, rows, 1), n, parts, 1)
        if not torch.equal(compensation, _compensation(codes)):
            raise LayoutError(f"{self.id}: the stored compensation is not 128 times the sums of the rows")
        return QTensor(fmt, codes, crop(tensors["weight_scale"], n, parts, 1), parts=parts)


def _compensation(codes: torch.Tensor) -> torch.Tensor:
    return codes.sum(-1, keepdim=True, dtype=torch.int32) * 128


CPU_VNNI_INT8 = CpuVnniInt8()
