"""FP8 and int8 weights beside a tensor of scales: per tensor, per output channel, or per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import FP8, INT8, WeightFormat
from tilewright.kernels.ops.convert import scale_codes
from tilewright.kernels.tensors import QTensor, Reject

from ..encoding import Decoder, StoredWeight, TensorGroup, TransposedDecoder

SCALES = ("weight_scale_inv", "weight_scale")  # two names, one meaning: a multiplier
CODES = {torch.float8_e4m3fn: "FP8", torch.int8: "int8"}
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class ScaledDecoder(Decoder):
    """value[n, k] = code[n, k] * scale[n // block_n, k // block_k], in fp32.

    Attributes:
        block_n: Rows that share a scale; 0 means all.
        block_k: Columns that share a scale; 0 means all.
    """

    block_n: int
    block_k: int

    def _grid(self, scale: torch.Tensor) -> torch.Tensor:
        """The scales as fp32 [rows, columns]."""
        scale = scale.to(torch.float32)
        if not self.block_n:
            return scale.reshape(1, 1)
        return scale.reshape(-1, 1) if not self.block_k else scale

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        codes, grid = tensors[0][rows], self._grid(tensors[1])
        if rows.step == 1:
            return scale_codes(codes, grid, self.block_n, self.block_k, rows.start)
        if self.block_n:
            grid = grid.index_select(0, torch.arange(rows.start, rows.stop, rows.step) // self.block_n)
        if self.block_k:
            grid = grid.repeat_interleave(self.block_k, 1)[:, : codes.shape[1]]
        return codes.to(torch.float32).mul_(grid)

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`."""
        return QTensor(fmt, tensors[0], self._grid(tensors[1]))

    def transposed(self) -> Decoder | None:
        """See `Decoder.transposed`: a grid of square blocks can be."""
        square = self.block_n == self.block_k == FP8.block_n
        return TransposedDecoder(self) if square else None


@dataclass(frozen=True)
class Scaled:
    """`weight` [N, K] of FP8 or int8 codes beside `weight_scale_inv` or `weight_scale`."""

    id: str = "scaled"
    suffixes: tuple[str, ...] = ("weight", "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_zero_point")

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        spec = group.specs.get("weight")
        if spec is None or not group.is_matrix():
            return None
        if spec.dtype == torch.float8_e5m2:
            return group.reject("is FP8 E5M2, only E4M3 weights are read", "dequantize it to bf16 first")
        if spec.dtype not in CODES:
            return None
        scale = next((suffix for suffix in SCALES if suffix in group.specs), None)
        if scale is None:
            return group.reject(
                f"is {CODES[spec.dtype]} but has neither `{group.module}.weight_scale_inv` nor `.weight_scale`",
                "its scale may be in a shard that is missing; fetch the checkpoint again",
            )
        if "weight_zero_point" in group.specs:
            return group.reject("has zero points; only symmetric weights are read")
        found = group.specs[scale]
        if found.dtype not in SCALE_DTYPES:
            return group.reject(f"has scales of dtype {found.dtype}, which says nothing about how to read them")
        blocks = _blocks(group, spec.shape, found.shape)
        if isinstance(blocks, Reject):
            return blocks
        kind = "per-tensor" if not blocks[0] else "per-channel" if not blocks[1] else f"block {blocks[0]}x{blocks[1]}"
        return StoredWeight(
            group.module,
            (group.names["weight"], group.names[scale]),
            group.others("weight", scale),
            spec.shape,
            f"{kind} {CODES[spec.dtype]}",
            ScaledDecoder(*blocks),
            _stored_format(spec.dtype, blocks),
        )


def _stored_format(dtype: torch.dtype, blocks: tuple[int, int]) -> str:
    same = {(torch.float8_e4m3fn, (FP8.block_n, FP8.block_k)): FP8.id, (torch.int8, (1, 0)): INT8.id}
    return same.get((dtype, blocks), "")


def _states_blocks(group: TensorGroup) -> bool:
    return bool(group.config.get("weight_block_size"))


def _blocks(group: TensorGroup, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int] | Reject:
    """(block_n, block_k) of a scale grid, 0 for "all"; leading dimensions are experts."""
    *experts, n, k = shape
    grid = scale[len(experts) :] if list(scale[: len(experts)]) == experts else scale
    if n == 1 and grid in {(1,), (1, 1)} and group.specs["weight"].dtype == torch.int8 and not _states_blocks(group):
        return 1, 0  # one channel is the whole tensor; read as a channel it can keep its codes
    if grid in {(), (1,), (1, 1)} and not (grid == (1, 1) and n <= FP8.block_n and k <= FP8.block_k):
        return 0, 0
    if grid in {(n,), (n, 1)} and (n > 1 or len(grid) == 1):
        return 1, 0
    stated = group.config.get("weight_block_size")
    bn, bk = stated if isinstance(stated, list) and len(stated) == 2 else (FP8.block_n, FP8.block_k)
    if grid == (-(-n // bn), -(-k // bk)):
        return int(bn), int(bk)
    return group.reject(
        f"is {list(shape)} with scales {list(scale)}, which are neither per tensor, per output channel nor per "
        f"{bn}x{bk} block"
    )


SCALED = Scaled()
