"""CPU layout of MXFP4 weights: scales and codes of a block side by side, so that kernels read one ascending stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import LayoutError
from ..formats import MXFP4, WeightFormat
from ..formats.mxfp4 import E8M0_BIAS, from_e8m0, to_e8m0
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors
from .cpu_blocks import BLOCK_N, check_shape, crop, packed_rows, pad, round_up

COLUMNS = 64  # of a block: two groups
GROUPS = COLUMNS // MXFP4.block_k
SCALE_BYTES = GROUPS * BLOCK_N
BLOCK_BYTES = SCALE_BYTES + COLUMNS * BLOCK_N // 2
UNIT = 8  # columns of a row whose codes lie in four bytes


@dataclass(frozen=True)
class CpuMxfp4:
    """Blocks of 32 rows and 64 columns: 64 bytes of scales, then 1024 bytes of codes.

    With Nc = Np / 32 blocks of rows (N rounded up to 32, each part for itself) and Kc = ceil(K / 64), `weight` is uint8
    [.., Nc, Kc, 1088]. In the block of row n and column k, the scale of row n and group k // 32 is the E8M0 byte
    `(k % 64 // 32) * 32 + n % 32`, and the code is in byte `64 + (k % 64 // 8) * 128 + (n % 32) * 4 + (k % 2) * 2 +
    k % 8 // 4`, in the low nibble if `k % 4 < 2`, else in the high one: eight columns of a row are a 32-bit word, the
    even ones in its lower half. Codes of padded rows and columns are 0, their scales 127, which is 1.
    """

    id: str = "cpu-mxfp4"
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Any [N, K] or [E, N, K] of MXFP4."""
        if fmt != MXFP4:
            return Reject(self.id, f"holds {MXFP4.id}, not {fmt.id}")
        return check_shape(self.id, shape, parts)

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """`weight`."""
        *lead, n, k = shape
        blocks = packed_rows(n, parts) // BLOCK_N
        return {"weight": TensorSpec(torch.uint8, (*lead, blocks, -(-k // COLUMNS), BLOCK_BYTES))}

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """Pad, bring eight columns of each row into a word, put the scales of each block before its codes.

        Raises:
            LayoutError: A scale is no power of two from 2^-127 to 2^127.
        """
        assert q.scales is not None
        stored = to_e8m0(q.scales)
        if not torch.equal(from_e8m0(stored), q.scales):
            raise LayoutError(f"{self.id}: a scale is no power of two, or NaN")
        *lead, n_blocks, k_blocks, _ = self.specs(q.format, q.shape, q.parts)["weight"].shape
        columns = k_blocks * COLUMNS
        codes = pad(q.codes, q.parts, columns).reshape(*lead, n_blocks, BLOCK_N, k_blocks, COLUMNS // UNIT, 2, 2, 2)
        joined = codes[..., 0, :] | codes[..., 1, :] << 4  # [.., row, k_block, unit, quad, parity]
        words = joined.movedim((-5, -1), (-3, -2))  # [.., k_block, unit, row, parity, quad]
        # XOR-ed with the bias, padding that is zero stands for 1.
        scales = pad(stored ^ E8M0_BIAS, q.parts, round_up(q.scales.shape[-1], GROUPS)) ^ E8M0_BIAS
        by_group = scales.reshape(*lead, n_blocks, BLOCK_N, k_blocks, GROUPS).movedim(-3, -1)
        weight = codes.new_empty(*lead, n_blocks, k_blocks, BLOCK_BYTES)
        weight[..., :SCALE_BYTES] = by_group.flatten(-2)
        weight[..., SCALE_BYTES:] = words.flatten(-4)
        return {"weight": weight}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`."""
        specs = self.specs(fmt, shape, parts)
        check_tensors(self.id, tensors, specs)
        *lead, n_blocks, k_blocks, _ = specs["weight"].shape
        weight = tensors["weight"]
        words = weight[..., SCALE_BYTES:].reshape(*lead, n_blocks, k_blocks, COLUMNS // UNIT, BLOCK_N, 2, 2)
        joined = words.movedim((-3, -2), (-5, -1))  # as in `pack`
        rows = torch.stack([joined & 15, joined >> 4], -2).reshape(*lead, n_blocks * BLOCK_N, k_blocks * COLUMNS)
        by_group = weight[..., :SCALE_BYTES].reshape(*lead, n_blocks, k_blocks, GROUPS, BLOCK_N)
        stored = by_group.movedim(-1, -3).reshape(*lead, n_blocks * BLOCK_N, k_blocks * GROUPS)
        *_, n, k = shape
        scales = from_e8m0(crop(stored, n, parts, fmt.scale_columns(k)))
        return QTensor(fmt, crop(rows, n, parts, k), scales, parts=parts)


CPU_MXFP4 = CpuMxfp4()
