"""Experts of native W4AFP8: int8 tensors that hold two int4 codes in a byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.formats import INT4_G128
from tilewright.kernels.tensors import Reject

from ..declared import QuantMethod
from ..encoding import StoredWeight, TensorGroup
from .fp8_methods import W4AFP8
from .int4_groups import int4_weight


@dataclass(frozen=True)
class W4Afp8Expert:
    """`weight` int8 [N, K / 2], told from real int8 by the shape of its scales, `weight_scale_inv` [N, K / 128]."""

    id: str = "w4afp8"
    suffixes: tuple[str, ...] = ("weight", "weight_scale_inv")
    methods: tuple[QuantMethod, ...] = (W4AFP8,)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        spec, scale = group.specs.get("weight"), group.specs.get("weight_scale_inv")
        if spec is None or not group.is_matrix() or spec.dtype != torch.int8 or scale is None:
            return None
        if group.method and (group.declared is None or group.declared.packing != self.id):
            return None
        if len(scale.shape) != len(spec.shape) or spec.shape[-2] == 1:
            return None
        k = spec.shape[-1] * 2
        if scale.shape[:-1] != spec.shape[:-1] or scale.shape[-1] * INT4_G128.block_k != k:
            return None
        return int4_weight(group, "weight", "weight_scale_inv", k, signed=True)


W4AFP8_EXPERT = W4Afp8Expert()
