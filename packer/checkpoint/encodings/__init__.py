"""Every encoding of weights that sources use, one visible line each; the first that claims tensors reads them."""

from __future__ import annotations

from tilewright.kernels.registry import Registry

from ..encoding import Encoding
from .awq import AWQ
from .bitsandbytes import BNB_4BIT, BNB_8BIT
from .fp4 import DEEPSEEK_FP4, FP4_PACKED, GPT_OSS, MODELOPT_FP4
from .gguf import GGUF
from .gptq import GPTQ
from .hqq import HQQ
from .mlx import MLX
from .pack_quantized import PACK_QUANTIZED
from .plain import PLAIN
from .quark import QUARK_FP4
from .scaled import SCALED
from .torchao import TORCHAO
from .w4afp8 import W4AFP8_EXPERT

ENCODINGS: Registry[Encoding] = Registry(
    "encoding",
    (
        PACK_QUANTIZED,
        FP4_PACKED,
        MODELOPT_FP4,
        DEEPSEEK_FP4,
        GPT_OSS,
        AWQ,
        GPTQ,
        GGUF,
        BNB_4BIT,
        BNB_8BIT,
        HQQ,
        MLX,
        QUARK_FP4,
        TORCHAO,
        W4AFP8_EXPERT,
        SCALED,
        PLAIN,
    ),
)
