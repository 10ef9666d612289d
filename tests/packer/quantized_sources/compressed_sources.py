"""Sources of compressed-tensors, written and read by that library."""

from __future__ import annotations

import copy
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

from .sources import MODULE, VARIANTS, QuantizedSource, generator, sized

N, K = 96, 256


def values(tensors: dict[str, torch.Tensor], block: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What compressed-tensors makes of a module, its scales in fp32 so that nothing is rounded."""
    order = block["config_groups"]["group_0"]["weights"].get("actorder")
    parsed = QuantizationConfig.model_validate(_without_order(block))
    (scheme,) = parsed.config_groups.values()
    assert isinstance(scheme, QuantizationScheme)
    if MODULE in (parsed.ignore or []) or scheme.weights is None:
        raise ValueError("not quantized")
    state = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items() if name.startswith(MODULE)}
    form = block["config_groups"]["group_0"].get("format") or block["format"]
    index = state.pop("weight_g_idx", None)
    if form in {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}:
        state["weight_scale"] = state["weight_scale"].to(torch.float32)
    if index is not None and order == "group":
        return {MODULE: _in_order(state, scheme, index, form)}
    if form in {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}:
        return {MODULE: _fp4(state, scheme, form)}
    decompressed = BaseCompressor.get_value_from_registry(form).decompress(state, scheme)
    return {MODULE: decompressed["weight"].to(torch.float64)}


def _without_order(block: dict[str, Any]) -> dict[str, Any]:
    """The config without `actorder: group`, which the library reads no more, though checkpoints have it."""
    block = copy.deepcopy(block)
    weights = block["config_groups"]["group_0"]["weights"]
    if weights.get("actorder") == "group":
        del weights["actorder"]
    return block


def _fp4(state: dict[str, torch.Tensor], scheme: QuantizationScheme, form: str) -> torch.Tensor:
    """As the library's `decompress`, but in fp32 throughout, where that rounds to bf16."""
    n, half = state["weight_packed"].shape
    codes = unpack_fp4_from_uint8(state["weight_packed"], n, half * 2, torch.float32)
    scale = decompress_mx_scale(state["weight_scale"]) if form.startswith("mx") else state["weight_scale"]
    whole = state.get("weight_global_scale") if form.startswith("nv") else None
    values = dequantize(codes, scale.float(), args=scheme.weights, global_scale=whole, dtype=torch.float32)
    return values.to(torch.float64)


def _in_order(
    state: dict[str, torch.Tensor], scheme: QuantizationScheme, index: torch.Tensor, form: str
) -> torch.Tensor:
    """Columns sorted by their group, read in that order, and put back."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    assert scheme.weights
    shape = torch.Size(state["weight_shape"].tolist())
    order = torch.argsort(index, stable=True)
    codes = unpack_from_int32(state["weight_packed"], scheme.weights.num_bits, shape)
    state = state | {"weight_packed": pack_to_int32(codes[:, order].contiguous(), scheme.weights.num_bits)}
    sorted_values = BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"]
    result = torch.empty_like(sorted_values)
    result[:, order] = sorted_values
    return result.to(torch.float64)


def _scales(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.rand(shape, generator=generator(3)) * 0.1 + 0.001).to(dtype)


def make(form: str, bits: int, kind: str, strategy: str, **fields: Any) -> QuantizedSource:
    """A module whose codes fill their whole range, compressed by the library."""
    size, order = fields.get("group_size"), fields.get("actorder") == "group"
    symmetric = fields.get("symmetric", True)
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False}
    weights |= {"observer": "minmax"} | fields
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    block: dict[str, Any] = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    block |= {"quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None}
    scheme = QuantizationScheme.model_validate(_without_order(block)["config_groups"]["group_0"])
    blocks = fields.get("block_structure")
    shapes = {"tensor": (1,), "channel": (N, 1), "group": (N, K // (size or K)), "tensor_group": (N, K // (size or K))}
    shape = (-(-N // blocks[0]), -(-K // blocks[1])) if blocks else shapes[strategy]
    scale = _scales(shape)
    state: dict[str, torch.Tensor] = {"weight_scale": scale}
    if form.startswith(("mx", "nv")):
        exponents = torch.randint(-8, 3, shape, generator=generator(5)).float()
        state["weight_scale"] = torch.exp2(exponents) if form.startswith("mx") else _scales(shape, torch.float32) * 100
    if form.startswith("nv"):
        state["weight_global_scale"] = torch.tensor([37.5])
    if not symmetric:
        low = -(1 << (bits - 1))
        state["weight_zero_point"] = torch.randint(low, -low, shape, generator=generator(4)).to(torch.int8)
    state["weight"] = torch.randn(N, K, generator=generator(6)) * 3
    compressed = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    tensors = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in compressed.items() if tensor is not None}
    if order:
        index = (torch.arange(K) // size)[torch.randperm(K, generator=generator(7))]
        tensors[f"{MODULE}.weight_g_idx"] = index.to(torch.int32)
    return QuantizedSource(tensors, block, values, sized(N, K))


def _add(name: str, *arguments: Any, **fields: Any) -> None:
    VARIANTS[f"ct-{name}"] = lambda: make(*arguments, **fields)


for _bits in (2, 3, 4, 5, 6, 7, 8):
    _add(f"pack{_bits}-g64", "pack-quantized", _bits, "int", "group", group_size=64)
    _add(f"pack{_bits}-asym", "pack-quantized", _bits, "int", "group", group_size=128, symmetric=False)
    if _bits in (2, 4, 8):
        _add(f"pack{_bits}-channel", "pack-quantized", _bits, "int", "channel")
        _add(f"pack{_bits}-channel-asym", "pack-quantized", _bits, "int", "channel", symmetric=False)
for _group in (16, 32, 128):
    _add(f"pack4-g{_group}", "pack-quantized", 4, "int", "group", group_size=_group)
_add("pack4-order", "pack-quantized", 4, "int", "group", group_size=64, actorder="group")
_add("pack4-order-asym", "pack-quantized", 4, "int", "group", group_size=64, actorder="group", symmetric=False)
_add("pack4-weight-order", "pack-quantized", 4, "int", "group", group_size=64, actorder="weight")
_add("int8-channel", "int-quantized", 8, "int", "channel")
_add("int8-tensor", "int-quantized", 8, "int", "tensor")
_add("int8-g64", "int-quantized", 8, "int", "group", group_size=64)
_add("int8-channel-asym", "int-quantized", 8, "int", "channel", symmetric=False)
_add("int8-g64-asym", "int-quantized", 8, "int", "group", group_size=64, symmetric=False)
_add("fp8-channel", "float-quantized", 8, "float", "channel")
_add("fp8-tensor", "float-quantized", 8, "float", "tensor")
_add("fp8-g128", "float-quantized", 8, "float", "group", group_size=128)
_add("fp8-block", "float-quantized", 8, "float", "block", block_structure=[128, 128])
_add("fp8-block-64", "float-quantized", 8, "float", "block", block_structure=[32, 64])
_add("fp8-naive", "naive-quantized", 8, "float", "channel")
_add("nvfp4", "nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16)
_add("mxfp4", "mxfp4-pack-quantized", 4, "float", "group", group_size=32)
_add("mxfp8", "mxfp8-quantized", 8, "float", "group", group_size=32, scale_dtype="torch.uint8")
