"""Int4 in groups along K, stored offset by 8, with bf16 scales."""

from __future__ import annotations

import torch

from .integer import IntegerFormat


def _groups_of(columns: int) -> IntegerFormat:
    return IntegerFormat(
        f"int4-g{columns}",
        4,
        torch.uint8,
        qmax=7.0,
        block_n=1,
        block_k=columns,
        zero_point=8,
        scale_dtype=torch.bfloat16,
        native="int4",
    )


INT4_G32, INT4_G64, INT4_G128 = map(_groups_of, (32, 64, 128))
INT4_BY_GROUP = {32: INT4_G32, 64: INT4_G64, 128: INT4_G128}
