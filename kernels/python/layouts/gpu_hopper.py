"""The layout that the bundled Hopper kernel reads fastest.

Weight, `tiles` uint8 [.., N/64, T, 64, 64] with T = ceil(K / 128): tile (i, t) covers rows 64i + r and columns
128t .. 128t + 127; byte (r, j) of it holds columns 128t + j ("low") and 128t + 64 + j ("high"). With v = code - 8 and
m = v for v >= 0, else -v - 1:

    bit 7 = sign of low    bits 3..1 = m of low    bits 6..4 = m of high    bit 0 = sign of high

so that `(w & 0x8E8E8E8E) + ((w & 0x80808080) >> 6)` and `((w >> 3) & 0x0E0E0E0E) + (w & 0x01010101) * 0x82` are four
e4m3 numbers each, v * 2**-8 exactly: seven integer operations for eight weights.

Scales, `scales` bf16 [.., 128T / group, N]: element (g, n) belongs to columns group * g .. of row n.

Columns beyond K (where K is no multiple of 128) hold v = 0 and scale 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import LayoutError
from ..formats import INT4_BY_GROUP, WeightFormat
from ..tensors import QTensor, Reject, TensorSpec
from .gpu_cutlass import check_tensors, symmetric_scales

TILE_N = 64
TILE_K = 128


@dataclass(frozen=True)
class GpuHopperW4:
    """Tiles of re-encoded int4 and scales by K group; see the module for the byte formula."""

    id: str = "gpu-hopper-w4"
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        if fmt not in INT4_BY_GROUP.values():
            return Reject(self.id, f"weight format {fmt.id} is not int4", "quantize with `--scheme w4afp8`")
        if len(shape) not in {2, 3}:
            return Reject(self.id, f"shape {list(shape)} is neither [N, K] nor [E, N, K]")
        if shape[-1] % fmt.block_k:
            return Reject(self.id, f"K = {shape[-1]} is not a multiple of the group, {fmt.block_k}")
        if shape[-2] % TILE_N:
            return Reject(self.id, f"N = {shape[-2]} is not a multiple of {TILE_N}")
        if shape[-2] % parts:
            return Reject(self.id, f"N = {shape[-2]} is not made of {parts} equal parts")
        return None

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of `tiles` and `scales`."""
        if reject := self.accepts(fmt, shape, parts):
            raise LayoutError(str(reject))
        *lead, n, k = shape
        tiles_k = -(-k // TILE_K)
        return {
            "tiles": TensorSpec(torch.uint8, (*lead, n // TILE_N, tiles_k, TILE_N, TILE_K // 2)),
            "scales": TensorSpec(torch.bfloat16, (*lead, tiles_k * (TILE_K // fmt.block_k), n)),
        }

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """Codes to tiles, scales rounded to bf16 as the kernel reads them."""
        scales = symmetric_scales(self.id, q)
        specs = self.specs(q.format, q.shape, q.parts)
        *lead, n, k = q.shape
        groups = specs["scales"].shape[-2]
        codes = F.pad(q.codes, (0, -k % TILE_K), value=q.format.zero_point)
        halves = codes.view(*lead, n // TILE_N, TILE_N, -1, 2, TILE_K // 2)
        tiles = encode(halves[..., 0, :], halves[..., 1, :]).transpose(-3, -2).contiguous()
        padded = F.pad(scales, (0, groups - scales.shape[-1]))
        return {"tiles": tiles, "scales": padded.to(torch.bfloat16).transpose(-2, -1).contiguous()}

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """Codes and scales again; exact for scales that are bf16 numbers.

        Raises:
            LayoutError: A tensor is missing or does not have the dtype and shape that `specs` demands.
        """
        check_tensors(self.id, tensors, self.specs(fmt, shape, parts))
        *lead, n, k = shape
        low, high = decode(tensors["tiles"].transpose(-3, -2))
        codes = torch.stack((low, high), -2).reshape(*lead, n, -1)[..., :k].contiguous()
        scales = tensors["scales"].transpose(-2, -1)[..., : k // fmt.block_k].to(torch.float32).contiguous()
        return QTensor(fmt, codes, scales, parts=parts)


def encode(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Bytes of the tile order from two codes each; all uint8 of one shape."""
    low, high = sign_magnitude(low), sign_magnitude(high)  # bit 3 = sign, bits 2..0 = m
    return ((low & 8) << 4) | ((low & 7) << 1) | ((high & 7) << 4) | (high >> 3)


def decode(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `encode`: the low and the high codes."""
    low = ((tiles >> 4) & 8) | ((tiles >> 1) & 7)
    high = ((tiles & 1) << 3) | ((tiles >> 4) & 7)
    return sign_magnitude_code(low), sign_magnitude_code(high)


def sign_magnitude(codes: torch.Tensor) -> torch.Tensor:
    """Bit 3 the sign of v = code - 8, bits 2..0 v itself or, where v is negative, -v - 1."""
    return codes ^ 15 ^ ((codes >> 3) * 7)


def sign_magnitude_code(bits: torch.Tensor) -> torch.Tensor:
    """The inverse of `sign_magnitude`."""
    return bits ^ 8 ^ ((bits >> 3) * 7)


GPU_HOPPER_W4 = GpuHopperW4()
