"""CPU layout of 4-bit weights with zero points: two rows in a byte, four columns side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import LayoutError
from ..formats import WeightFormat
from ..formats.integer import IntegerFormat
from ..ops.convert import pack_int4
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors
from .cpu_blocks import BLOCK_N, check_shape, crop, packed_rows, pad

MAX_BLOCK_K = 128


@dataclass(frozen=True)
class CpuVnniInt4:
    """Blocks of 32 rows and bk = min(group, 128) columns: nibbles, then the compensation of the 32 rows.

    With Nc = Np / 32 blocks of rows (N rounded up to 32, each part for itself), Kc = ceil(K / bk) blocks of columns,
    G = ceil(K / group) and B = 16 * bk + 128: `weight` is uint8 [.., Nc, Kc, B]. Code (n, k) of a matrix of packed rows
    lies in byte `((n // 32) * Kc + k // bk) * B + (k % bk // 4) * 64 + (n % 32 // 16) * 32 + (n % 8) * 4 + k % 4`, in
    the low nibble if `n // 8` is even, else in the high one. After its 16 * bk bytes a block holds 32 little-endian
    int32, `sum_k (code[n, k] - zero)` over the block's columns for each row. `weight_zero_point` int8 and
    `weight_scale` fp32 are [.., Nc, G, 32]. Padded rows are zero throughout; padded columns hold the zero point of
    their group.
    """

    id: str = "cpu-vnni-int4"
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Any [N, K] or [E, N, K] of 4-bit codes in groups of 32, 64 or a multiple of 128."""
        if not isinstance(fmt, IntegerFormat) or fmt.bits != 4 or fmt.block_n != 1:
            return Reject(self.id, f"holds 4-bit codes with scales for groups of columns, not {fmt.id}")
        if fmt.block_k not in {32, 64} and (fmt.block_k == 0 or fmt.block_k % MAX_BLOCK_K):
            return Reject(self.id, f"group {fmt.block_k} is neither 32 nor 64 nor a multiple of 128")
        return check_shape(self.id, shape, parts)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """`weight`, `weight_zero_point` and `weight_scale`."""
        *lead, n, k = shape
        block_k = min(fmt.block_k, MAX_BLOCK_K)
        blocks = packed_rows(n, parts) // BLOCK_N
        grid = (*lead, blocks, fmt.scale_columns(k), BLOCK_N)
        return {
            "weight": TensorSpec(torch.uint8, (*lead, blocks, -(-k // block_k), 16 * block_k + 128)),
            "weight_zero_point": TensorSpec(torch.int8, grid),
            "weight_scale": TensorSpec(torch.float32, grid),
        }

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """Pad, put rows n and n + 8 of each 16 in one byte, gather four columns at a time, append the compensation."""
        assert q.scales is not None
        specs = self.specs(q.format, q.shape, q.parts)
        block_k = (specs["weight"].shape[-1] - 128) // 16
        zeros = q.zeros if q.zeros is not None else torch.full_like(q.scales, q.format.zero_point, dtype=torch.uint8)
        weight = pack_int4(q.codes, zeros, q.parts, block_k, q.format.block_k)
        zeros = pad(zeros, q.parts, zeros.shape[-1])
        return {
            "weight": weight,
            "weight_zero_point": _by_block(zeros).view(torch.int8),
            "weight_scale": _by_block(pad(q.scales, q.parts, q.scales.shape[-1])),
        }

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack` (zero points that are all the format's own are given as None).

        A compensation that does not fit its row is refused.
        """
        specs = self.specs(fmt, shape, parts)
        check_tensors(self.id, tensors, specs)
        *_, n, k = shape
        block_k = (specs["weight"].shape[-1] - 128) // 16
        words = tensors["weight"].contiguous().view(torch.int32)
        codes = codes_of(words[..., : block_k * 4])
        zeros = by_row(tensors["weight_zero_point"].view(torch.uint8))
        sums = _compensation(codes, zeros, block_k, fmt.block_k)
        if not torch.equal(sums, by_row(words[..., block_k * 4 :])):
            raise LayoutError(f"{self.id}: the stored compensation is not the sum of `code - zero` over its block")
        groups = specs["weight_scale"].shape[-2]
        zeros = crop(zeros, n, parts, groups)
        return QTensor(
            fmt,
            crop(codes, n, parts, k),
            crop(by_row(tensors["weight_scale"]), n, parts, groups),
            None if bool((zeros == fmt.zero_point).all()) else zeros,
            parts,
        )


def _compensation(codes: torch.Tensor, zeros: torch.Tensor, block_k: int, group: int) -> torch.Tensor:
    """int32 [.., Np, K / block_k]: sum of `code - zero` over each block."""
    *rows, k = codes.shape
    sums = codes.reshape(*rows, k // block_k, block_k).sum(-1, dtype=torch.int32)
    per_block = zeros.repeat_interleave(group // block_k, -1)[..., : sums.shape[-1]]
    return sums - per_block.to(torch.int32) * block_k


def _by_block(matrix: torch.Tensor) -> torch.Tensor:
    """[.., Np, C] -> [.., Np / 32, C, 32]."""
    *lead, rows, columns = matrix.shape
    return matrix.reshape(*lead, rows // BLOCK_N, BLOCK_N, columns).transpose(-1, -2).contiguous()


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """Codes of blocks: int32 [.., Np / 32, Kc, 4 * bk] -> uint8 [.., Np, Kc * bk]."""
    *lead, n_blocks, k_blocks, size = words.shape
    nibbles = words.reshape(*lead, n_blocks, k_blocks, size // 16, 2, 8)
    pairs = nibbles.movedim((-4, -3), (-2, -1)).contiguous().view(torch.uint8)  # [.., n_blocks, 2, 8, k_blocks, bk]
    rows = torch.stack([pairs & 15, pairs >> 4], -4)  # [.., n_blocks, 2, 2, 8, k_blocks, block_k]
    return rows.reshape(*lead, n_blocks * BLOCK_N, k_blocks * size // 4)


def by_row(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of `_by_block`."""
    return blocks.transpose(-1, -2).flatten(-3, -2).contiguous()


CPU_VNNI_INT4 = CpuVnniInt4()
