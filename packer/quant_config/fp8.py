"""`quant_method: fp8` with 128 x 128 blocks: SGLang, vLLM, transformers, TensorRT-LLM."""

from __future__ import annotations

from typing import Any

from .inputs import QuantConfigInputs


def write(output: QuantConfigInputs) -> dict[str, Any]:
    """The block. `activation_scheme` and `weight_block_size` must be there: absence means per-tensor, or an error."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(output.unquantized),
    }
