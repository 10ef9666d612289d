"""Symmetric int4 weights: compressed-tensors pack-quantized, and the experts of native W4AFP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import INT4_BY_GROUP, WeightFormat
from tilewright.kernels.ops.convert import scale_codes, split_nibbles
from tilewright.kernels.tensors import QTensor, Reject

from .base import Group, SourceWeight


@dataclass(frozen=True)
class Int4Reader:
    """value[n, k] = (nibble[n, k] - 8) * scale[n, k // group], in fp32; low nibble = even column.

    Attributes:
        group: Columns that share a scale.
        signed: Nibbles are two's complement instead of offset-binary.
    """

    group: int
    signed: bool

    def _codes(self, joined: torch.Tensor) -> torch.Tensor:
        """uint8 codes 0..15 around 8."""
        joined = joined.contiguous().view(torch.uint8)
        return split_nibbles(joined, flip=8 if self.signed else 0)

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Reader.rows`."""
        return scale_codes(self._codes(tensors[0][rows]), tensors[1][rows].to(torch.float32), 1, self.group)

    def raw(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Reader.raw`."""
        return tensors[0][rows]

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Reader.codes`."""
        return QTensor(fmt, self._codes(tensors[0]), tensors[1].to(torch.bfloat16).to(torch.float32))


def detect_packed(group: Group) -> SourceWeight | Reject | None:
    """A `weight_packed` of compressed-tensors, or None."""
    if "weight_packed" not in group.specs:
        return None
    for suffix, what in (("weight_zero_point", "zero points"), ("weight_g_idx", "an activation order")):
        if suffix in group.specs:
            return group.reject(f"has {what}; only symmetric int4 in natural order is read")
    packed, scale = group.specs["weight_packed"], group.specs.get("weight_scale")
    if scale is None:
        return group.reject(f"has no `{group.module}.weight_scale`", "fetch the checkpoint again")
    if packed.dtype != torch.int32:
        return group.reject(f"is {packed.dtype}, pack-quantized weights are int32")
    return _weight(group, packed.shape[-1] * 8, (group.names["weight_packed"], group.names["weight_scale"]), False)


def detect_w4afp8(group: Group) -> SourceWeight | Reject | None:
    """An int8 tensor that holds two int4 codes per byte, told from real int8 by the shape of its scales, or None."""
    spec, scale = group.specs["weight"], group.specs.get("weight_scale_inv")
    if spec.dtype != torch.int8 or scale is None or len(scale.shape) != len(spec.shape) or spec.shape[-2] == 1:
        return None
    if scale.shape[:-1] != spec.shape[:-1] or scale.shape[-1] * 128 != spec.shape[-1] * 2:
        return None
    return _weight(group, spec.shape[-1] * 2, (group.weight, group.names["weight_scale_inv"]), True)


def _weight(group: Group, k: int, tensors: tuple[str, str], signed: bool) -> SourceWeight | Reject:
    spec, scale = group.specs["weight"], group.specs["weight_scale_inv" if signed else "weight_scale"]
    columns = scale.shape[-1] if len(scale.shape) > 1 else 1
    size = k // columns
    if scale.shape != (*spec.shape[:-1], columns) or k % columns or size not in INT4_BY_GROUP:
        return group.reject(
            f"has {k} columns and scales {list(scale.shape)}: groups of {k / columns:g}, known are "
            f"{', '.join(map(str, INT4_BY_GROUP))}"
        )
    companions = tuple(name for name in group.names.values() if name not in tensors)
    keeps = (INT4_BY_GROUP[size].id,) if signed or scale.dtype == torch.bfloat16 else ()
    shape = (*spec.shape[:-1], k)
    return SourceWeight(group.module, tensors, companions, shape, f"int4 group {size}", Int4Reader(size, signed), keeps)
