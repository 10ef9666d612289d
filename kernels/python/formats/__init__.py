"""Every number format, one visible line each; `base.py` says what they are."""

from __future__ import annotations

from ..registry import Registry
from .base import WeightFormat
from .bf16 import BF16
from .fp8 import FP8
from .int4 import INT4_BY_GROUP, INT4_G32, INT4_G64, INT4_G128
from .int8 import INT8
from .mxfp4 import MXFP4

FORMATS: Registry[WeightFormat] = Registry(
    "weight format",
    (
        BF16,
        INT8,
        FP8,
        INT4_G32,
        INT4_G64,
        INT4_G128,
        MXFP4,
    ),
)

__all__ = [
    "BF16",
    "FORMATS",
    "FP8",
    "INT4_BY_GROUP",
    "INT4_G32",
    "INT4_G64",
    "INT4_G128",
    "INT8",
    "MXFP4",
    "WeightFormat",
]
