"""`quant_method: compressed-tensors`: vLLM, transformers, SGLang."""

from __future__ import annotations

from typing import Any

from tilewright.kernels.rotation import KIND

from ..families.config import HEAD_SIZE
from .inputs import QuantConfigInputs


def _arguments(**fields: Any) -> dict[str, Any]:
    """The fields of one QuantizationArgs, those not given at their defaults."""
    defaults: dict[str, Any] = {"group_size": None, "block_structure": None, "actorder": None, "observer_kwargs": {}}
    return {**defaults, "symmetric": True, "dynamic": False, "observer": "minmax"} | fields


def _block(
    output: QuantConfigInputs, layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    """The block; "Linear" as the only target and a global format, as SGLang's detection wants it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    block = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": dict(output.kv_cache) if output.kv_cache else None,
        "ignore": list(dict.fromkeys((*output.unquantized, *output.tied))),
        "config_groups": {"group_0": group},
    }
    return block | ({"transform_config": _transforms(output)} if output.rotated else {})


def _transforms(output: QuantConfigInputs) -> dict[str, Any]:
    """Which inputs are rotated by what: `input` is for engines, `weight_input` says what was done to the weights.

    Most modules have one rotation, which names the class of all and what is not meant; others name their modules.
    """
    rotated = {rotation: modules for rotation, modules in output.rotated.items() if rotation}
    most = max(rotated, key=lambda rotation: len(rotated[rotation]))
    apart = [module for rotation, modules in output.rotated.items() if rotation != most for module in modules]
    ignored = list(dict.fromkeys((*output.unquantized, *apart)))
    groups = {}
    for rotation, modules in rotated.items():
        of_all = rotation == most
        where = {"targets": ["Linear"] if of_all else [*modules], "ignore": ignored if of_all else []}
        groups[str(rotation)] = {
            "type": KIND,
            HEAD_SIZE: rotation.block,  # the format calls every block so
            "randomize": False,
            "requires_grad": False,
            "apply": [
                {**where, "location": "input", "inverse": False},
                {**where, "location": "weight_input", "inverse": True},
            ],
        }
    return {"config_groups": groups}


def write_block_fp8(output: QuantConfigInputs) -> dict[str, Any]:
    """FP8 in blocks of 128 x 128, activations in groups of 128 per token."""
    weights = _arguments(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    inputs = _arguments(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True, observer=None)
    return _block(output, "float-quantized", weights, inputs)


def write_int8(output: QuantConfigInputs) -> dict[str, Any]:
    """int8 per output channel, activations per token."""
    weights = _arguments(num_bits=8, type="int", strategy="channel")
    inputs = _arguments(num_bits=8, type="int", strategy="token", dynamic=True, observer=None)
    return _block(output, "int-quantized", weights, inputs)


def write_int4(output: QuantConfigInputs) -> dict[str, Any]:
    """int4 in groups along K, 16-bit activations."""
    weights = _arguments(num_bits=4, type="int", strategy="group", group_size=output.group)
    return _block(output, "pack-quantized", weights, None)


def write_mxfp4(output: QuantConfigInputs) -> dict[str, Any]:
    """FP4 in groups of 32, scales as the bytes of E8M0, 16-bit activations."""
    scales = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    weights = _arguments(num_bits=4, type="float", strategy="group", group_size=32, **scales)
    return _block(output, "mxfp4-pack-quantized", weights, None)


def write_w4afp8(output: QuantConfigInputs) -> dict[str, Any]:
    """int4 in groups of 128, FP8 activations per token; everything but the routed experts is in `ignore`."""
    weights = _arguments(num_bits=4, type="int", strategy="group", group_size=128)
    inputs = _arguments(num_bits=8, type="float", strategy="token", dynamic=True, observer=None)
    return _block(output, "pack-quantized", weights, inputs)
