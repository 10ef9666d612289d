"""compressed-tensors `pack-quantized`: symmetric int4 codes, eight in a word."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.tensors import Reject

from ..encoding import StoredWeight, TensorGroup
from .int4_groups import int4_weight


@dataclass(frozen=True)
class PackQuantized:
    """`weight_packed` int32 [N, K / 8] beside `weight_scale` [N, K / group] and `weight_shape`."""

    id: str = "pack-quantized"
    suffixes: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        packed = group.specs.get("weight_packed")
        if packed is None or not group.is_matrix("weight_packed"):
            return None
        for suffix, what in (("weight_zero_point", "zero points"), ("weight_g_idx", "an activation order")):
            if suffix in group.specs:
                reason = f"has {what}; only symmetric int4 in natural order is read"
                return group.reject(reason, suffix="weight_packed")
        if "weight_scale" not in group.specs:
            reason = f"has no `{group.module}.weight_scale`"
            return group.reject(reason, "fetch the checkpoint again", suffix="weight_packed")
        if packed.dtype != torch.int32:
            return group.reject(f"is {packed.dtype}, pack-quantized weights are int32", suffix="weight_packed")
        return int4_weight(group, "weight_packed", "weight_scale", packed.shape[-1] * 8, signed=False)


PACK_QUANTIZED = PackQuantized()
