"""Every scheme, one visible line each."""

from __future__ import annotations

from tilewright.kernels.registry import Registry

from .block_fp8 import BLOCK_FP8
from .int4 import INT4
from .int8 import INT8
from .mxfp4 import MXFP4
from .scheme import Scheme
from .w4afp8 import W4AFP8

SCHEMES: Registry[Scheme] = Registry(
    "scheme",
    (
        BLOCK_FP8,
        INT8,
        INT4,
        MXFP4,
        W4AFP8,
    ),
)
