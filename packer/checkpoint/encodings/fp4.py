"""FP4 E2M1 codes, two in a byte: NVFP4 of compressed-tensors and ModelOpt, MXFP4, GPT-OSS and DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tilewright.kernels.formats import WeightFormat, mxfp4
from tilewright.kernels.ops.convert import split_nibbles
from tilewright.kernels.tensors import QTensor, Reject

from ..declared import QuantMethod
from ..encoding import Decoder, StoredWeight, TensorGroup
from .bits import E2M1
from .compressed_tensors import COMPRESSED_TENSORS
from .fp8_methods import METHODS, MXFP4

Global = Literal["none", "multiplier", "divisor"]
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_VALUES = torch.tensor(E2M1)


@dataclass(frozen=True)
class Fp4Decoder(Decoder):
    """value[n, k] = e2m1[code[n, k]] * (scale[n, k // group] by the global scale), in fp32; low nibble = even column.

    Attributes:
        group: Columns that share a scale.
        overall: What the third tensor, one number, does to the scales of groups.
    """

    group: int
    overall: Global = "none"

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`."""
        codes = split_nibbles(tensors[0].contiguous().view(torch.uint8).flatten(1))
        return QTensor(fmt, codes, mxfp4.from_e8m0(tensors[1]))

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        codes = tensors[0][rows].contiguous().view(torch.uint8).flatten(1)
        values = _VALUES[torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(torch.int64)]
        stored = tensors[1][rows]
        scales = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(torch.float32)
        if self.overall == "multiplier":
            scales = scales * tensors[2].to(torch.float32).reshape(())
        elif self.overall == "divisor":
            scales = scales / tensors[2].to(torch.float32).reshape(())
        return values.mul_(scales.repeat_interleave(self.group, 1))


def _fp4(
    group: TensorGroup, codes: str, scale: str, size: int, overall: Global, global_scale: str, what: str
) -> StoredWeight | Reject:
    """The weight of the tensors of these suffixes, or what is wrong with them."""
    if missing := group.missing(codes, scale, *([global_scale] if global_scale else [])):
        return missing
    *experts, n, half = group.specs[codes].shape
    k = half * 2
    scale_types = torch.float8_e4m3fn if global_scale else E8M0
    expected: dict[str, object] = {
        codes: ((torch.uint8, torch.int8) if codes == "weight" else torch.uint8, (*experts, n, half)),
        scale: (scale_types, (*experts, n, -(-k // size))),
    }
    if global_scale:
        expected[global_scale] = (torch.float32, {(), (1,)})
    if k % size:
        return group.reject(f"has {k} columns, no whole groups of {size}", suffix=codes)
    if wrong := group.mismatch(expected, f"FP4 codes in groups of {size}"):  # type: ignore[arg-type]
        return wrong
    names = tuple(group.names[suffix] for suffix in expected)
    stored = mxfp4.MXFP4.id if not global_scale else ""
    decoder = Fp4Decoder(size, overall)
    return StoredWeight(group.module, names, group.others(*expected), (*experts, n, k), what, decoder, stored)


@dataclass(frozen=True)
class Fp4Packed:
    """compressed-tensors: `weight_packed` uint8 [N, K / 2], `weight_scale`, and for NVFP4 `weight_global_scale`."""

    id: str = "fp4-packed"
    suffixes: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    methods: tuple[QuantMethod, ...] = (COMPRESSED_TENSORS,)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        packings = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
        if "weight_packed" not in group.specs or declared is None or declared.packing not in packings:
            return None
        is_nv = declared.packing == packings[0]
        size = 16 if is_nv else 32
        wanted = ("float", 4, (1, size))
        if (declared.kind, declared.bits, declared.block) != wanted or not declared.symmetric:
            reason = f"is declared as {declared.kind}{declared.bits} in groups of {declared.block}"
            return group.reject(f"{reason}; {declared.packing} is FP4 in groups of {size}", suffix="weight_packed")
        if declared.scale_dtype not in {"", "float8_e4m3fn" if is_nv else "uint8"}:
            return group.reject(f"has scales of type {declared.scale_dtype}, says config.json", suffix="weight_packed")
        if not is_nv:
            return _fp4(group, "weight_packed", "weight_scale", size, "none", "", "MXFP4")
        return _fp4(group, "weight_packed", "weight_scale", size, "divisor", "weight_global_scale", "NVFP4")


@dataclass(frozen=True)
class ModelOptFp4:
    """ModelOpt: `weight` uint8 [N, K / 2], `weight_scale` FP8 [N, K / 16], `weight_scale_2` fp32."""

    id: str = "nvfp4-modelopt"
    suffixes: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2")
    methods: tuple[QuantMethod, ...] = METHODS

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        spec, declared = group.specs.get("weight"), group.declared
        if spec is None or not group.is_matrix() or declared is None or declared.packing != self.id:
            return None
        if spec.dtype in {torch.bfloat16, torch.float16, torch.float32} and len(group.specs) == 1:
            return None
        return _fp4(group, "weight", "weight_scale", 16, "multiplier", "weight_scale_2", "NVFP4 of ModelOpt")


@dataclass(frozen=True)
class DeepSeekFp4:
    """Routed experts of DeepSeek-V4: `weight` int8 [N, K / 2] beside `scale` E8M0 [N, K / 32]."""

    id: str = "mxfp4-deepseek"
    suffixes: tuple[str, ...] = ("weight", "scale", "weight_scale_inv")
    methods: tuple[QuantMethod, ...] = METHODS

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        declared = group.declared
        if "weight" not in group.specs or declared is None or declared.packing != "mxfp4" or not group.is_matrix():
            return None
        if group.specs["weight"].dtype.is_floating_point and len(group.specs) == 1:
            return None
        scale = "scale" if "scale" in group.specs else "weight_scale_inv"
        return _fp4(group, "weight", scale, 32, "none", "", "MXFP4 of DeepSeek")


@dataclass(frozen=True)
class BlocksDecoder(Fp4Decoder):
    """The codes of each group lie along a dimension of their own: [N, K / 32, 16]."""


@dataclass(frozen=True)
class GptOss:
    """Stacks `gate_up_proj_blocks` uint8 [E, N, K / 32, 16] beside `gate_up_proj_scales` E8M0 [E, N, K / 32]."""

    id: str = "mxfp4-blocks"
    suffixes: tuple[str, ...] = ("blocks", "scales")
    methods: tuple[QuantMethod, ...] = (MXFP4,)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        if "blocks" not in group.specs:
            return None
        if group.declared is None or group.declared.packing != "mxfp4":
            return group.undeclared("MXFP4 blocks of GPT-OSS", "blocks")
        if missing := group.missing("scales"):
            return missing
        shape = group.specs["blocks"].shape
        if len(shape) != 4 or not group.stack:
            return group.reject(f"is {list(shape)}, blocks are [experts, rows, groups, 16]", suffix="blocks")
        expected = {"blocks": (torch.uint8, (*shape[:3], 16)), "scales": (E8M0, shape[:3])}
        if wrong := group.mismatch(expected, "MXFP4"):
            return wrong
        names = (group.names["blocks"], group.names["scales"])
        whole = (shape[0], shape[1], shape[2] * 32)
        others, decoder = group.others("blocks", "scales"), BlocksDecoder(32)
        return StoredWeight(group.module, names, others, whole, "MXFP4", decoder, mxfp4.MXFP4.id, layout=self.id)


FP4_PACKED, MODELOPT_FP4, DEEPSEEK_FP4, GPT_OSS = Fp4Packed(), ModelOptFp4(), DeepSeekFp4(), GptOss()
