"""`quant_method: w4afp8`: SGLang; and the two files that TensorRT-LLM reads instead of config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ..families.experts import ExpertSpellings
from ..families.parallel import MERGED
from .inputs import QuantConfigInputs

# Static activation scale of experts without calibration. FP8 is a floating format: under scale 1 every activation
# between 2^-6 and 448 keeps its full 3 bits of mantissa, which covers normalised hidden states, and 1 is also what
# SGLang's own buffers begin with. A calibrated value replaces it; engines with dynamic scales never look at it.
UNCALIBRATED_INPUT_SCALE = 1.0

SPELLINGS = ExpertSpellings()
MERGED_NAMES = {part: merged.name for merged in MERGED for part in merged.parts}  # TensorRT-LLM's merged modules


def write(output: QuantConfigInputs) -> dict[str, Any]:
    """The block. SGLang reads `quant_method` alone; the rest tells people and other tools what the files hold."""
    return {
        "quant_method": "w4afp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "group_size": 128,
        "modules_to_not_convert": list(output.unquantized),
    }


def extra_files(quantized: Iterable[tuple[str, bool]]) -> dict[str, bytes]:
    """`hf_quant_config.json` and `quant_cfg.json` for TensorRT-LLM.

    Args:
        quantized: Module path of each quantized Linear, and whether it is a routed expert.

    Returns:
        File name -> content.
    """
    layers: dict[str, dict[str, str]] = {}
    for module, is_expert in quantized:
        if is_expert:
            layers[SPELLINGS.container(module) or module] = {"quant_algo": "W4A8_AWQ"}
        else:
            stem, _, last = module.rpartition(".")
            layers[f"{stem}.{MERGED_NAMES.get(last, last)}"] = {"quant_algo": "FP8_BLOCK_SCALES"}
    mixed = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    return {
        "hf_quant_config.json": _dump({"quantization": mixed}),
        "quant_cfg.json": _dump({**mixed, "quantized_layers": layers}),
    }


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
