"""FP8 and int8 weights beside a tensor of scales: per tensor, per output channel, per group of columns or per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import FP8, INT8, WeightFormat
from tilewright.kernels.ops.convert import scale_codes
from tilewright.kernels.tensors import QTensor, Reject

from ..declared import QuantMethod
from ..encoding import Decoder, StoredWeight, TensorGroup, TransposedDecoder
from .affine import AffineDecoder
from .compressed_tensors import COMPRESSED_TENSORS
from .fp8_methods import METHODS

SCALES = ("weight_scale_inv", "weight_scale", "scale")  # three names, one meaning: a multiplier
CODES = {torch.float8_e4m3fn: "FP8", torch.int8: "int8"}
KINDS = {torch.float8_e4m3fn: "float", torch.int8: "int"}
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
PACKINGS = ("", "int-quantized", "float-quantized", "naive-quantized", "w4afp8", "mxfp8-quantized")
MX = "mxfp8-quantized"  # scales are powers of two, stored as the bytes of float8_e8m0fnu


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
        scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
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
class ShiftedDecoder(AffineDecoder):
    """int8 codes with zero points: weight [N, K], scales and zero points [N, G], or of one element each."""

    def unpack(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.unpack`: signed here."""
        return tensors[0][rows]

    def scales(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.scales`."""
        return self._grid(tensors, 1)[rows]

    def zeros(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor | None:
        """See `AffineDecoder.zeros`."""
        return self._grid(tensors, 2)[rows]

    def _grid(self, tensors: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        return (
            tensors[number]
            .reshape(-1, tensors[number].shape[-1] if tensors[number].dim() else 1)
            .expand(len(tensors[0]), -1)
        )


@dataclass(frozen=True)
class Scaled:
    """`weight` [N, K] of FP8 or int8 codes beside `weight_scale_inv` or `weight_scale`."""

    id: str = "scaled"
    suffixes: tuple[str, ...] = ("weight", *SCALES, "weight_scale_2", "weight_zero_point")
    methods: tuple[QuantMethod, ...] = (*METHODS, COMPRESSED_TENSORS)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        spec, declared = group.specs.get("weight"), group.declared
        if spec is None or not group.is_matrix():
            return None
        if spec.dtype == torch.float8_e5m2:
            return group.reject("is FP8 E5M2, only E4M3 weights are read", "dequantize it to bf16 first")
        if spec.dtype not in CODES or (declared and declared.packing not in PACKINGS):
            return None
        scale = next((suffix for suffix in SCALES if suffix in group.specs), None)
        if scale is None:
            return group.reject(
                f"is {CODES[spec.dtype]} but has neither `{group.module}.weight_scale_inv` nor `.weight_scale`",
                "its scale may be in a shard that is missing; fetch the checkpoint again",
            )
        if group.method and declared is None:
            return group.undeclared(f"{CODES[spec.dtype]} codes", "weight")
        if declared and declared.kind and (declared.kind, declared.bits) != (KINDS[spec.dtype], 8):
            return group.reject(f"is {CODES[spec.dtype]}, config.json says {declared.kind}{declared.bits}")
        if declared and declared.by_activation:
            return group.reject("was quantized in the order of activations, which is not read for codes of 8 bits")
        return self._weight(group, scale)

    def _weight(self, group: TensorGroup, scale: str) -> StoredWeight | Reject:
        spec, found, declared = group.specs["weight"], group.specs[scale], group.declared
        is_mx = declared is not None and declared.packing == MX
        if declared and is_mx and (declared.kind, declared.block, scale) != ("float", (1, 32), "weight_scale"):
            return group.reject(f"is declared as {MX}, which is FP8 in groups of 32 beside `weight_scale`")
        if found.dtype not in ((torch.uint8, torch.float8_e8m0fnu) if is_mx else SCALE_DTYPES):
            return group.reject(f"has scales of dtype {found.dtype}, which says nothing about how to read them")
        blocks = _blocks(group, spec.shape, found.shape)
        if isinstance(blocks, Reject):
            return blocks
        kind = "per-tensor" if not blocks[0] else "per-channel" if not blocks[1] else f"block {blocks[0]}x{blocks[1]}"
        if "weight_zero_point" in group.specs:
            return _shifted(group, scale, blocks)
        if declared is not None and not declared.symmetric:
            return group.reject("has no zero points, config.json says that it is asymmetric")
        return StoredWeight(
            group.module,
            (group.names["weight"], group.names[scale]),
            group.others("weight", scale),
            spec.shape,
            f"{kind} {CODES[spec.dtype]}",
            ScaledDecoder(*blocks),
            _stored_format(spec.dtype, blocks),
        )


def _shifted(group: TensorGroup, scale: str, blocks: tuple[int, int]) -> StoredWeight | Reject:
    """A weight with zero points."""
    spec, zeros, declared = group.specs["weight"], group.specs["weight_zero_point"], group.declared
    if declared is None or declared.symmetric or spec.dtype != torch.int8 or blocks[0] > 1 or len(spec.shape) != 2:
        return group.reject("has zero points; they are read beside int8 codes whose config says `symmetric: false`")
    if zeros.dtype != torch.int8 or zeros.shape != group.specs[scale].shape:
        reason = f"has zero points {zeros.dtype} {list(zeros.shape)}, its scales are {list(group.specs[scale].shape)}"
        return group.reject(reason)
    used = ("weight", scale, "weight_zero_point")
    names = tuple(group.names[suffix] for suffix in used)
    kind = f"int8 with zero points, group {blocks[1] or 'K'}"
    n, k = spec.shape
    return StoredWeight(group.module, names, group.others(*used), (n, k), kind, ShiftedDecoder(8, k, blocks[1], 0))


def _stored_format(dtype: torch.dtype, blocks: tuple[int, int]) -> str:
    same = {(torch.float8_e4m3fn, (FP8.block_n, FP8.block_k)): FP8.id, (torch.int8, (1, 0)): INT8.id}
    return same.get((dtype, blocks), "")


def _blocks(group: TensorGroup, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int] | Reject:
    """(block_n, block_k) of a scale grid, 0 for "all"; leading dimensions are experts."""
    *experts, n, k = shape
    grid = scale[len(experts) :] if list(scale[: len(experts)]) == experts else scale
    stated = group.declared.block if group.declared else None
    if stated and min(stated) > 0 and stated != (FP8.block_n, FP8.block_k):
        if grid == (-(-n // stated[0]), -(-k // stated[1])) and (stated[0] > 1 or k % stated[1] == 0):
            return stated
        return group.reject(f"is {list(shape)} with scales {list(scale)}; config.json says blocks of {list(stated)}")
    found = _inferred(group, (n, k), grid)
    if found is None:
        return group.reject(
            f"is {list(shape)} with scales {list(scale)}, which are neither per tensor, per output channel nor per "
            f"{FP8.block_n}x{FP8.block_k} block"
        )
    same = found == stated or 1 in {n, k} or (min(found) > 1 and n <= found[0] and k <= found[1])
    if stated and not same and group.method == "compressed-tensors":
        return group.reject(f"is {list(shape)} with scales {list(scale)}; config.json says blocks of {list(stated)}")
    return found


def _inferred(group: TensorGroup, shape: tuple[int, int], grid: tuple[int, ...]) -> tuple[int, int] | None:
    """The blocks that a grid of scales stands for, where the config does not say, or says blocks of 128 x 128."""
    n, k = shape
    is_block = bool(group.declared and group.declared.block and min(group.declared.block) > 0)
    if n == 1 and grid in {(1,), (1, 1)} and group.specs["weight"].dtype == torch.int8 and not is_block:
        return 1, 0  # one channel is the whole tensor; read as a channel it can keep its codes
    if grid in {(), (1,), (1, 1)} and not (grid == (1, 1) and n <= FP8.block_n and k <= FP8.block_k):
        return 0, 0
    if grid in {(n,), (n, 1)} and (n > 1 or len(grid) == 1):
        return 1, 0
    if grid == (-(-n // FP8.block_n), -(-k // FP8.block_k)):
        return FP8.block_n, FP8.block_k
    return None


SCALED = Scaled()
