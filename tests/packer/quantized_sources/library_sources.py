"""Sources written and read by the library that defines the format: MLX, bitsandbytes, HQQ, torchao; Quark by formula.

bitsandbytes, HQQ and torchao are large, and change what transformers does where they are installed, so most runs do
without them: `recorded_sources.py` has what they wrote and read. `make test-oracles` runs them.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import torch

from .float_sources import exponents, fp4_values, spread
from .sources import MODULE, VARIANTS, QuantizedSource, generator, sized

LIBRARIES = ("mlx", "bitsandbytes", "hqq", "torchao", "gguf", "compressed_tensors")
INSTALLED = {name for name in LIBRARIES if importlib.util.find_spec(name)}
Tensors = dict[str, torch.Tensor]
N, K = 96, 256


def weights(seed: int, k: int = 0) -> torch.Tensor:
    """Weights as a model may have them."""
    return torch.randn(N, k or K, generator=generator(seed)) * 0.1


def _state(tensors: Tensors) -> Tensors:
    return {name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items()}


# MLX


def _mlx_array(tensor: torch.Tensor) -> Any:
    import mlx.core as mx

    if tensor.dtype.is_floating_point:
        return mx.array(tensor.float().numpy())
    return mx.array(tensor.numpy())


def mlx_values(tensors: Tensors, block: dict[str, Any]) -> Tensors:
    """mlx.core.dequantize with scales in fp32, so that nothing is rounded."""
    import mlx.core as mx

    apart = block.get(MODULE, True)
    if apart is False or "weight" not in block and block.get("mode", "affine") != "affine":
        raise ValueError("not quantized, or otherwise")
    sizes = {key: (apart if isinstance(apart, dict) else block)[key] for key in ("bits", "group_size")}
    if tensors[f"{MODULE}.weight"].dtype != torch.uint32:
        raise ValueError("no codes")
    found = (_mlx_array(tensors[f"{MODULE}.{name}"]) for name in ("weight", "scales", "biases"))
    return {MODULE: torch.from_numpy(np.array(mx.dequantize(*found, **sizes)))}


def _mlx(bits: int, group: int, dtype: torch.dtype, key: str = "quantization", **apart: Any) -> QuantizedSource:
    import mlx.core as mx

    values = weights(bits).to(dtype).float()
    words, scales, biases = mx.quantize(mx.array(values.numpy()), group_size=group, bits=bits)
    tensors = {
        f"{MODULE}.weight": torch.from_numpy(np.array(words)),
        f"{MODULE}.scales": torch.from_numpy(np.array(scales)).to(dtype),
        f"{MODULE}.biases": torch.from_numpy(np.array(biases)).to(dtype),
    }
    block: dict[str, Any] = {"group_size": group, "bits": bits, "mode": "affine"} | apart
    if apart:
        block |= {"bits": 8, "group_size": 128}
    config = sized(N, K) | ({"quantization": block} if key != "quantization" else {})
    return QuantizedSource(tensors, block, mlx_values, config, key=key)


# bitsandbytes


def bnb_values(tensors: Tensors, block: dict[str, Any]) -> Tensors:
    """bitsandbytes.functional's dequantization into fp32."""
    import bitsandbytes.functional as bnb

    state = _state(tensors)
    if any(MODULE.endswith(name) for name in block.get("llm_int8_skip_modules") or []):
        raise ValueError("not quantized")
    if "SCB" in state:
        if state["weight"].dtype != torch.int8 or not block.get("load_in_8bit"):
            raise ValueError("no int8")
        return {MODULE: bnb.int8_vectorwise_dequant(state["weight"], state["SCB"])}
    if not block.get("load_in_4bit"):
        raise ValueError("not in 4 bits")
    said = {name: tensor for name, tensor in state.items() if name.startswith("weight.")}
    quant_state = bnb.QuantState.from_dict(said, torch.device("cpu"))
    quant_state.dtype = torch.float32
    return {MODULE: bnb.dequantize_4bit(state["weight"], quant_state)}


def _bnb(kind: str, nested: bool, k: int = 0, blocksize: int = 64, storage: str = "uint8") -> QuantizedSource:
    import bitsandbytes as bnb

    k = k or K
    parameter = bnb.nn.Params4bit(
        weights(3, k).bfloat16(),
        requires_grad=False,
        quant_type=kind,
        compress_statistics=nested,
        blocksize=blocksize,
        quant_storage=getattr(torch, storage),
    )._quantize("cpu")
    linear = bnb.nn.Linear4bit(k, N, bias=False, quant_type=kind, compress_statistics=nested)
    linear.weight = parameter
    tensors = {f"{MODULE}.{name}": tensor.detach().clone() for name, tensor in linear.state_dict().items()}
    block = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True}
    block |= {"_load_in_8bit": False, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    block |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": storage}
    block |= {"llm_int8_skip_modules": None, "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}
    return QuantizedSource(tensors, block, bnb_values, sized(N, k))


def _bnb_int8() -> QuantizedSource:
    import bitsandbytes as bnb

    codes, scales, _ = bnb.functional.int8_vectorwise_quant(weights(4).half())
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.SCB": scales}
    tensors[f"{MODULE}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    block = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    block |= {"llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}
    return QuantizedSource(tensors, block, bnb_values, sized(N, K))


# HQQ


def hqq_values(tensors: Tensors, block: dict[str, Any]) -> Tensors:
    """HQQLinear's own reading of its tensors, computed in fp32."""
    from hqq.core.quantize import HQQLinear, Quantizer

    if MODULE.rpartition(".")[2] in (block.get("skip_modules") or []) or MODULE in (block.get("skip_modules") or []):
        raise ValueError("not quantized")
    linear = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu", initialize=False)
    linear.load_state_dict({name: tensor.clone() for name, tensor in _state(tensors).items()})
    meta = linear.meta | {"compute_dtype": torch.float32}
    meta |= {name: meta[name].float() for name in ("scale", "zero")}
    return {MODULE: Quantizer.dequantize(linear.W_q.data, meta)}


def _hqq(bits: int, group: int | None, axis: int, dtype: torch.dtype = torch.bfloat16) -> QuantizedSource:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight = torch.nn.Parameter(weights(bits).to(dtype), requires_grad=False)
    config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    made = HQQLinear(linear, config, compute_dtype=dtype, device="cpu", del_orig=False)
    tensors = {f"{MODULE}.{name}": tensor for name, tensor in made.state_dict().items()}
    params = {"nbits": bits, "channel_wise": True, "group_size": group, "optimize": True, "round_zero": bits == 4}
    stated = {"weight_quant_params": params | {"axis": axis, "view_as_float": False}}
    stated |= {"scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}  # type: ignore[dict-item]
    block = {"quant_method": "hqq", "quant_config": stated, "skip_modules": ["lm_head"]}
    return QuantizedSource(tensors, block, hqq_values, sized(N, K))


# torchao


def torchao_values(tensors: Tensors, metadata: dict[str, str]) -> Tensors:
    """torchao's own reading, in fp32; of Int4Tensor, which no CPU reads there, the sum that its kernel computes."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    said = json.loads(metadata[f"{MODULE}.weight"])
    if said["_type"] == "Int4Tensor":
        raw = tensors[f"{MODULE}._weight_qdata"].numpy().view(np.uint8)
        codes = np.stack((raw & 15, raw >> 4), -1).reshape(len(raw), -1).astype(np.float64)
        codes = np.where(codes > 7, codes - 16, codes)
        scale, zero = (tensors[f"{MODULE}._weight_{name}"].double().numpy().T for name in ("scale", "zero_point"))
        size = said["_data"]["block_size"][1]
        values = codes * scale.repeat(size, 1) + zero.repeat(size, 1)
        return {MODULE: torch.from_numpy(values)}
    if "target_dtype" in said["_data"]:
        said["_data"]["dtype"]["_data"] = "float32"
        metadata = metadata | {f"{MODULE}.weight": json.dumps(said)}
    whole, rest = unflatten_tensor_state_dict(dict(tensors), metadata)
    if rest:
        raise ValueError("parts are left")
    weight = whole[f"{MODULE}.weight"]
    return {MODULE: weight.dequantize() if "target_dtype" in said["_data"] else weight.dequantize(torch.float32)}


def _torchao(config: Any, dtype: torch.dtype = torch.bfloat16) -> QuantizedSource:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_
    from transformers import TorchAoConfig

    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight = torch.nn.Parameter(weights(5).to(dtype), requires_grad=False)
    quantize_(linear, config)
    tensors, metadata = flatten_tensor_state_dict({f"{MODULE}.weight": linear.weight.data})
    block = json.loads(json.dumps(TorchAoConfig(config).to_dict(), default=lambda value: value.value))
    return _torchao_source(tensors, block, metadata)


def _torchao_source(tensors: Tensors, block: dict[str, Any], metadata: dict[str, str]) -> QuantizedSource:
    def values(found: Tensors, said: dict[str, Any]) -> Tensors:
        if said.get("quant_method") != "torchao" or MODULE in (said.get("modules_to_not_convert") or []):
            raise ValueError("not quantized")
        return torchao_values(found, metadata)

    return QuantizedSource(tensors, block, values, sized(N, K), metadata)


def _torchao_int4(group: int) -> QuantizedSource:
    shape = (K // group, N)
    tensors = {
        f"{MODULE}._weight_qdata": torch.randint(-128, 128, (N, K // 2), generator=generator(6), dtype=torch.int8),
        f"{MODULE}._weight_scale": (torch.rand(shape, generator=generator(7)) * 0.1 + 0.01).bfloat16(),
        f"{MODULE}._weight_zero_point": (torch.rand(shape, generator=generator(8)) - 0.5).bfloat16(),
    }
    data = {"activation_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "block_size": [1, group]}
    said = {"_type": "Int4Tensor", "_data": data | {"shape": [N, K]}}
    said["_tensor_data_names"] = ["qdata", "scale", "zero_point"]  # type: ignore[assignment]
    metadata = {f"{MODULE}.weight": json.dumps(said), "tensor_names": json.dumps([f"{MODULE}.weight"])}
    return _torchao_source(tensors, {"quant_method": "torchao", "modules_to_not_convert": None}, metadata)


# Quark, whose library brings a hundred others with it: by its formula


def _quark(kind: str) -> QuantizedSource:
    spec: dict[str, Any] = {"dtype": "fp8_e4m3", "is_dynamic": False, "observer_cls": "PerTensorMinMaxObserver"}
    if kind == "mxfp4":
        spec |= {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
        tensors = {
            f"{MODULE}.weight": torch.randint(0, 256, (N, K // 2), generator=generator(5), dtype=torch.uint8),
            f"{MODULE}.weight_scale": torch.randint(110, 130, (N, K // 32), generator=generator(6), dtype=torch.uint8),
        }
    else:
        spec |= {"qscheme": kind, "ch_axis": 0 if kind == "per_channel" else None, "group_size": None}
        scale = torch.rand(N if kind == "per_channel" else (), generator=generator(7)) * 0.01 + 0.001
        codes = (torch.randn(N, K, generator=generator(8)) * 60).to(torch.float8_e4m3fn)
        tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": scale}
    export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
    whole = {"weight": spec, "input_tensors": None, "output_tensors": None, "bias": None}
    block = {"quant_method": "quark", "global_quant_config": whole, "layer_quant_config": {}, "exclude": ["lm_head"]}
    block |= {"export": export, "quant_mode": "eager_mode", "algo_config": None}

    def values(found: Tensors, said: dict[str, Any]) -> Tensors:
        stated = said["global_quant_config"]["weight"]
        weight, scales = found[f"{MODULE}.weight"], found[f"{MODULE}.weight_scale"]
        if MODULE in said["exclude"] or "*o_proj" in said["exclude"] or said.get("quant_method") != "quark":
            raise ValueError("not quantized")
        if stated["dtype"] == "fp4":
            numbers = fp4_values(weight)
            return {MODULE: numbers * spread(exponents(scales), (N, K), (1, 32))}
        if weight.dtype != torch.float8_e4m3fn or scales.numel() not in {1, N}:
            raise ValueError("no FP8")
        return {MODULE: (weight.double() * scales.double().reshape(-1, 1)).float()}

    return QuantizedSource(tensors, block, values, sized(N, K))


for _kind in ("per_tensor", "per_channel", "mxfp4"):
    VARIANTS[f"quark-{_kind}"] = lambda kind=_kind: _quark(kind)
if "mlx" in INSTALLED:
    for _bits in (2, 3, 4, 5, 6, 8):
        VARIANTS[f"mlx-{_bits}"] = lambda bits=_bits: _mlx(bits, 64, torch.bfloat16)
    VARIANTS["mlx-4-32-fp16"] = lambda: _mlx(4, 32, torch.float16)
    VARIANTS["mlx-8-128-fp32"] = lambda: _mlx(8, 128, torch.float32, "quantization_config")
    VARIANTS["mlx-6-apart"] = lambda: _mlx(6, 64, torch.bfloat16, **{MODULE: {"bits": 6, "group_size": 64}})
if "bitsandbytes" in INSTALLED:
    for _kind in ("nf4", "fp4"):
        for _nested in (False, True):
            _name = f"bnb-{_kind}{'-double' * _nested}"
            VARIANTS[_name] = lambda kind=_kind, nested=_nested: _bnb(kind, nested)
    VARIANTS["bnb-nf4-odd"] = lambda: _bnb("nf4", True, k=200)  # blocks run on from row to row
    VARIANTS["bnb-nf4-128"] = lambda: _bnb("nf4", True, blocksize=128)
    VARIANTS["bnb-nf4-bf16"] = lambda: _bnb("nf4", True, storage="bfloat16")
    VARIANTS["bnb-int8"] = _bnb_int8
if "hqq" in INSTALLED:
    for _bits, _size, _axis in ((8, None, 1), (8, 128, 1), (4, 64, 1), (4, 64, 0), (3, 64, 1), (2, 16, 1), (1, 64, 0)):
        _name = f"hqq-{_bits}-{_size}-{_axis}"
        VARIANTS[_name] = lambda bits=_bits, size=_size, axis=_axis: _hqq(bits, size, axis)
    VARIANTS["hqq-4-fp16"] = lambda: _hqq(4, 64, 1, torch.float16)
if "torchao" in INSTALLED:

    def _of_torchao(name: str, **fields: Any) -> QuantizedSource:
        import torchao.quantization as ao

        if "granularity" in fields:
            fields["granularity"] = getattr(ao, fields["granularity"][0])(*fields["granularity"][1:])
        return _torchao(getattr(ao, name)(**fields))

    for _name, _arguments in {
        "int8": {"name": "Int8WeightOnlyConfig", "version": 2},
        "int8-dynamic": {"name": "Int8DynamicActivationInt8WeightConfig", "version": 2},
        "fp8": {"name": "Float8WeightOnlyConfig"},
        "intx4": {"name": "IntxWeightOnlyConfig", "weight_dtype": torch.int4, "granularity": ("PerGroup", 32)},
        "intx2": {"name": "IntxWeightOnlyConfig", "weight_dtype": torch.int2, "granularity": ("PerGroup", 64)},
        "intx8": {"name": "IntxWeightOnlyConfig", "weight_dtype": torch.int8, "granularity": ("PerAxis", 0)},
    }.items():
        VARIANTS[f"torchao-{_name}"] = lambda arguments=_arguments: _of_torchao(**arguments)
    VARIANTS["torchao-int4-64"] = lambda: _torchao_int4(64)
    VARIANTS["torchao-int4-32"] = lambda: _torchao_int4(32)
