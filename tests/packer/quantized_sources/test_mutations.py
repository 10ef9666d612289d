"""A source that says or holds something else is refused, or read as the format's own definition reads it.

Every key of every variant's config takes other legal values, goes, or gets a neighbour; every tensor takes other types
and shapes, or goes. Nothing may be read differently from the independent reader in silence.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewright.kernels.errors import TilewrightError

from . import compressed_sources, float_sources, library_sources, recorded_sources  # noqa: F401  # add their variants
from .conftest import RefusedError, read_source
from .sources import MODULE, VARIANTS, QuantizedSource

pytestmark = pytest.mark.xdist_group("mutations")  # the last test counts what the others of its process did
Path = tuple[str, ...]
LEGAL: dict[str, list[Any]] = {  # other values that a key may legally have
    "quant_method": ["gptq", "awq", "fp8", "compressed-tensors", "modelopt", "w8a8_int8", "mxfp4", "nobody"],
    "bits": [2, 3, 4, 8],
    "num_bits": [2, 3, 4, 6, 8],
    "group_size": [16, 32, 64, 128, -1, None],
    "sym": [True, False],
    "symmetric": [True, False],
    "desc_act": [True, False],
    "zero_point": [True, False],
    "version": ["gemm", "gemv", "gemv_fast"],
    "checkpoint_format": ["gptq", "gptq_v2", "marlin"],
    "packing_format": ["auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq"],
    "data_type": ["int", "mx_fp"],
    "type": ["int", "float"],
    "strategy": ["tensor", "channel", "group", "block", "tensor_group"],
    "block_structure": [[128, 128], [64, 64], [64, 32]],
    "weight_block_size": [[128, 128], [64, 64], [128, 64], None],
    "format": ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"]
    + ["mxfp4-pack-quantized", "mxfp8-quantized", "marlin-24", "dense"],
    "actorder": ["weight", "group", None],
    "dynamic": [True, "local"],
    "scale_dtype": ["torch.uint8", "torch.float8_e4m3fn", "torch.float16"],
    "ignore": [[MODULE], ["re:.*o_proj"], ["re:.*q_proj"]],
    "targets": [["re:.*q_proj"], [MODULE], ["re:.*o_proj$"]],
    "modules_to_not_convert": [[MODULE], ["o_proj"], ["q_proj"]],
    "exclude_modules": [["*o_proj"], ["*q_proj"]],
    "quant_algo": ["FP8", "NVFP4", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A8_AWQ"],
    "expert_dtype": ["fp8", "fp4"],
    "fmt": ["e4m3", "e5m2"],
    "quantization_status": ["compressed", "frozen", "initialized"],
    "kv_cache_scheme": [{"num_bits": 8, "type": "float"}],
    "activation_scheme": ["static", "dynamic"],
    "mode": ["affine", "mxfp4", "nvfp4"],
    "load_in_4bit": [True, False],
    "load_in_8bit": [True, False],
    "bnb_4bit_quant_type": ["nf4", "fp4"],
    "bnb_4bit_use_double_quant": [True, False],
    "bnb_4bit_quant_storage": ["uint8", "bfloat16", "float32"],
    "llm_int8_skip_modules": [[MODULE], ["o_proj"], ["q_proj"]],
    "llm_int8_has_fp16_weight": [True],
    "nbits": [1, 2, 3, 4, 8],
    "axis": [0, 1],
    "view_as_float": [True],
    "channel_wise": [False],
    "scale_quant_params": [{"nbits": 8, "group_size": 128}],
    "skip_modules": [[MODULE], ["o_proj"], ["q_proj"]],
    "dtype": ["fp8_e4m3", "fp4", "int4", "fp8_e5m2"],
    "qscheme": ["per_tensor", "per_channel", "per_group"],
    "ch_axis": [0, 1, -1],
    "scale_format": ["float", "e8m0"],
    "weight_format": ["real_quantized", "fake_quantized"],
    "exclude": [[MODULE], ["*o_proj"], ["lm_head"]],
    MODULE: [False, True, {"bits": 3, "group_size": 64}, {"bits": 6, "group_size": 32}],
}
ADDED: list[tuple[Path, Any]] = [  # keys that change what numbers mean, or that nobody knows
    (("transform_config",), {"config_groups": {"u": {"type": "hadamard"}}}),
    (("sparsity_config",), {"format": "sparse-24-bitmask"}),
    (("dynamic",), {"-:.*o_proj": {}}),
    (("dynamic",), {"+:.*o_proj": {"bits": 2}}),
    (("extra_config",), {MODULE: {"bits": 2}}),
    (("pre_quant_scale",), True),
    (("rotation",), "hadamard"),
    (("a_key_of_tomorrow",), 1),
    (("config_groups", "group_0", "weights", "a_key_of_tomorrow"), 1),
    (("config_groups", "group_0", "format"), "dense"),
]
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn)


def keys(block: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    """Every key of a config, at any depth."""
    for key, value in block.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


def changed(block: dict[str, Any], path: Path, value: Any = None, *, remove: bool = False) -> dict[str, Any] | None:
    """A config with one key changed or removed; None where there is no place for it."""
    result = copy.deepcopy(block)
    holder: Any = result
    for key in path[:-1]:
        if not isinstance(holder, dict) or key not in holder:
            return None
        holder = holder[key]
    if remove:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return result


def mutated_configs(source: QuantizedSource) -> Iterator[tuple[str, QuantizedSource]]:
    """The source with other configs."""
    for path in keys(source.block):
        for value in LEGAL.get(path[-1], []):
            block = changed(source.block, path, value)
            if block is not None and block != source.block:
                yield f"{'.'.join(path)} = {value}", replace(source, block=block)
        block = changed(source.block, path, remove=True)
        assert block is not None
        yield f"without {'.'.join(path)}", replace(source, block=block)
    for path, value in ADDED:
        block = changed(source.block, path, value)
        if block is not None and block != source.block:
            yield f"with {'.'.join(path)}", replace(source, block=block)
    yield "without a config", replace(source, block={})
    for key, text in source.metadata.items():
        without = {name: said for name, said in source.metadata.items() if name != key}
        yield f"without {key} in the metadata", replace(source, metadata=without)
        for old, new in (("[1, ", "[2, "), ("Tensor", "Tensor2"), ("dtype", "tensor_dtype"), ('"qdata", ', "")):
            if (other := text.replace(old, new)) != text:
                yield f"{new} in the metadata", replace(source, metadata=without | {key: other})


def mutated_tensors(source: QuantizedSource) -> Iterator[tuple[str, QuantizedSource]]:
    """The source with other tensors."""
    for name, tensor in source.tensors.items():
        others = {"gone": None}
        for dtype in TYPES:
            if dtype != tensor.dtype:
                others[str(dtype)] = (
                    tensor.float().to(dtype) if dtype.itemsize < 4 or tensor.dim() else tensor.to(dtype)
                )
        if tensor.dim() >= 1 and len(tensor) > 1:
            others |= {"one row less": tensor[:-1], "half of the rows": tensor[: len(tensor) // 2]}
        if tensor.dim() >= 2 and tensor.shape[-1] > 1:
            others |= {"one column less": tensor[..., :-1], "half the columns": tensor[..., : tensor.shape[-1] // 2]}
            others |= {"transposed": tensor.transpose(-1, -2), "flat": tensor.reshape(-1)}
        others["one dimension more"] = tensor.unsqueeze(0)
        for what, other in others.items():
            tensors = {key: value for key, value in source.tensors.items() if key != name}
            if other is not None:
                tensors[name] = other.contiguous()
            yield f"{name.removeprefix(MODULE)} {what}", replace(source, tensors=tensors)


def outcome(source: QuantizedSource, original: dict[str, torch.Tensor]) -> str:
    """What became of a mutated source: refused, right, or a difference."""
    try:
        document = source.document() if source.block else source.config
        found = read_source(source.tensors, document, source.metadata)
    except (RefusedError, TilewrightError):
        return "refused"
    try:
        expected = source.oracle(source.tensors, source.block)
    except Exception:  # the format's definition does not cover it: the numbers must be those of the original
        expected = original
    if found.keys() != expected.keys():
        return f"other modules: {sorted(found)}" if found else "nothing quantized is found"
    same = all(torch.equal(found[name], values.to(torch.float32)) for name, values in expected.items())
    return "right" if same else "DIFFERENT"


STRIDE = 6  # one in so many is run, other ones for each variant; TILEWRIGHT_MUTATION_STRIDE=1 runs them all
COUNTS: dict[str, int] = {"refused": 0, "right": 0}
RAN: set[str] = set()


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_read_differently_in_silence(name: str) -> None:
    stride = int(os.environ.get("TILEWRIGHT_MUTATION_STRIDE", STRIDE))
    source = VARIANTS[name]()
    original = source.oracle(source.tensors, source.block)
    mutations = [*mutated_configs(source), *mutated_tensors(source)]
    first = list(VARIANTS).index(name) % stride
    outcomes = {what: outcome(mutated, original) for what, mutated in mutations[first::stride]}
    assert {what: found for what, found in outcomes.items() if found not in COUNTS} == {}
    RAN.add(name)
    for found in outcomes.values():
        COUNTS[found] += 1


def test_there_are_enough_of_them() -> None:
    """At least 500 mutations and 60 variants; the most part of them is refused, and some are read."""
    assert len(VARIANTS) >= 60
    if set(VARIANTS) == RAN:  # in this process
        assert sum(COUNTS.values()) >= 500
        assert COUNTS["refused"] > COUNTS["right"] > 50
