"""Sources in FP8 and FP4: of quant_method fp8, ModelOpt, GPT-OSS, DeepSeek-V4, fbgemm; and int8 of SGLang."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import mxfp4

from .sources import MODULE, VARIANTS, QuantizedSource, generator, sized

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, torch.Tensor]
N, K = 192, 256


def fp8(n: int = N, k: int = K) -> torch.Tensor:
    """Random FP8 codes."""
    return (torch.randn(n, k, generator=generator(1)) * 60).to(torch.float8_e4m3fn)


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the lower one first: fp32."""
    if packed.dtype not in {torch.uint8, torch.int8} or packed.dim() != 2:
        raise ValueError("no bytes of FP4")
    raw = packed.view(torch.uint8).to(torch.int64)
    codes = torch.stack([raw % 16, raw // 16], -1).flatten(1)
    return E2M1[codes % 8] * (1 - 2 * (codes // 8))


def spread(scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """A grid of scales over the elements of a matrix, each for a block."""
    if scale.dim() != 2 or tuple(scale.shape) != tuple(
        -(-size // unit) for size, unit in zip(shape, block, strict=True)
    ):
        raise ValueError("scales do not fit")
    return scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 as fp32."""
    if scale.dtype not in {torch.uint8, torch.float8_e8m0fnu}:
        raise ValueError("no E8M0")
    return torch.exp2(scale.view(torch.uint8).double() - 127).float()


def block_fp8_values(tensors: Tensors, block: dict[str, Any]) -> Tensors:
    """Code times the scale of its block, of its tensor, or of its row."""
    weight = tensors[f"{MODULE}.weight"]
    scale = next(tensor for name, tensor in tensors.items() if "scale" in name and "input" not in name)
    size = block.get("weight_block_size")
    if weight.dtype not in {torch.float8_e4m3fn, torch.int8} or weight.dim() != 2:
        raise ValueError("no codes")
    n, k = weight.shape
    if size:
        return {MODULE: weight.float() * spread(scale, (n, k), tuple(size))}
    if scale.numel() == 1:
        return {MODULE: weight.float() * scale.float().reshape(1, 1)}
    if tuple(scale.shape) in {(n, 1), (n,)}:
        return {MODULE: weight.float() * scale.float().reshape(n, 1)}
    return {MODULE: weight.float() * spread(scale, (n, k), (128, 128))}


def _fp8(scale: str, dtype: torch.dtype, block: tuple[int, int] | None, **fields: Any) -> QuantizedSource:
    shape: tuple[int, ...] = () if block is None else (-(-N // block[0]), -(-K // block[1]))
    power = torch.exp2(torch.randint(-10, -2, shape, generator=generator(2)).float())
    stated: dict[str, Any] = {"weight_block_size": list(block)} if block else {}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"} | stated | fields
    tensors = {f"{MODULE}.weight": fp8(), f"{MODULE}.{scale}": power.to(dtype)}
    return QuantizedSource(tensors, config, block_fp8_values, sized(N, K))


for _dtype in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
    for _scale in ("weight_scale_inv", "weight_scale", "scale"):
        _name = f"fp8-128-{str(_dtype).removeprefix('torch.')}-{_scale}"
        VARIANTS[_name] = lambda a=(_scale, _dtype, (128, 128)): _fp8(*a)
VARIANTS["fp8-64x128"] = lambda: _fp8("weight_scale_inv", torch.float32, (64, 128))
VARIANTS["fp8-tensor"] = lambda: _fp8("weight_scale", torch.float32, None, activation_scheme="static")


def _rows(method: str, codes: torch.Tensor, **fields: Any) -> QuantizedSource:
    scale = torch.rand(N, 1, generator=generator(3)) * 0.01 + 0.001
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": scale}
    return QuantizedSource(tensors, {"quant_method": method} | fields, block_fp8_values, sized(N, K))


def _int8() -> torch.Tensor:
    return torch.randint(-127, 128, (N, K), generator=generator(4), dtype=torch.int8)


VARIANTS["fbgemm-fp8"] = lambda: _rows("fbgemm_fp8", fp8(), activation_scale_ub=1200.0)
VARIANTS["w8a8-fp8"] = lambda: _rows("w8a8_fp8", fp8())
VARIANTS["w8a8-int8"] = lambda: _rows("w8a8_int8", _int8())


def _modelopt(algorithm: str) -> QuantizedSource:
    block = {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": []}
    codes = torch.randint(0, 256, (N, K // 2), generator=generator(5), dtype=torch.uint8)
    if algorithm == "NVFP4":
        tensors = {
            f"{MODULE}.weight": codes,
            f"{MODULE}.weight_scale": (torch.rand(N, K // 16, generator=generator(6)) * 100 + 1).to(
                torch.float8_e4m3fn
            ),
            f"{MODULE}.weight_scale_2": torch.tensor(0.00123),
            f"{MODULE}.input_scale": torch.tensor(0.5),
        }
        block["group_size"] = 16
    elif algorithm == "MXFP8":
        scales = torch.randint(100, 130, (N, K // 32), generator=generator(6), dtype=torch.uint8)
        tensors = {f"{MODULE}.weight": fp8(), f"{MODULE}.weight_scale": scales}
    else:
        tensors = {f"{MODULE}.weight": fp8(), f"{MODULE}.weight_scale": torch.tensor(0.0123)}

    def values(found: Tensors, said: dict[str, Any]) -> Tensors:
        """ModelOpt's own order: the scale of a group times the global one first, both in fp32."""
        weight, scale = found[f"{MODULE}.weight"], found[f"{MODULE}.weight_scale"]
        kind = said.get("quant_algo", "FP8")
        if kind != algorithm:
            raise ValueError("another algorithm")
        if kind == "NVFP4":
            numbers = fp4_values(weight)
            if scale.dtype != torch.float8_e4m3fn:
                raise ValueError("scales are no FP8")
            overall = found[f"{MODULE}.weight_scale_2"].reshape(())
            return {MODULE: numbers * spread(scale.float() * overall, tuple(numbers.shape), (1, 16))}
        if kind == "MXFP8":
            return {MODULE: weight.float() * spread(exponents(scale), tuple(weight.shape), (1, 32))}
        return block_fp8_values(found, {})

    return QuantizedSource(tensors, block, values, sized(N, K))


for _algorithm in ("FP8", "NVFP4", "MXFP8"):
    VARIANTS[f"modelopt-{_algorithm.lower()}"] = lambda a=_algorithm: _modelopt(a)


def _gpt_oss() -> QuantizedSource:
    experts, hidden, inner = 3, 64, 96
    stack = "model.layers.0.mlp.experts"
    tensors = {}
    for name, (n, k) in {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.items():
        shape = (experts, n, k // 32, 16)
        tensors[f"{stack}.{name}_blocks"] = torch.randint(0, 256, shape, generator=generator(7), dtype=torch.uint8)
        scales = torch.randint(110, 125, shape[:3], generator=generator(8), dtype=torch.uint8)
        tensors[f"{stack}.{name}_scales"] = scales

    def values(found: Tensors, said: dict[str, Any]) -> Tensors:
        """What transformers makes of them: stacks [E, in, out], whose columns are gate and up in turn."""
        dense = {}
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = found[f"{stack}.{name}_blocks"], found[f"{stack}.{name}_scales"]
            if blocks.dtype != torch.uint8 or scales.dtype not in {torch.uint8, torch.float8_e8m0fnu}:
                raise ValueError("no MXFP4")
            dense[name] = mxfp4.convert_moe_packed_tensors(blocks, scales.view(torch.uint8), dtype=torch.float32)
        result = {}
        for expert in range(len(dense["down_proj"])):
            result[f"{stack}.{expert}.gate_proj"] = dense["gate_up_proj"][expert, :, 0::2].T
            result[f"{stack}.{expert}.up_proj"] = dense["gate_up_proj"][expert, :, 1::2].T
            result[f"{stack}.{expert}.down_proj"] = dense["down_proj"][expert].T
        return result

    block = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = {"model_type": "gpt_oss", "hidden_size": hidden, "intermediate_size": inner, "num_local_experts": experts}
    return QuantizedSource(tensors, block, values, config)


VARIANTS["gpt-oss"] = _gpt_oss


def _deepseek_v4() -> QuantizedSource:
    expert = "model.layers.0.mlp.experts.0.down_proj"
    tensors = {
        f"{expert}.weight": torch.randint(-128, 128, (N, K // 2), generator=generator(9), dtype=torch.int8),
        f"{expert}.scale": torch.randint(110, 125, (N, K // 32), generator=generator(9), dtype=torch.uint8).view(
            torch.float8_e8m0fnu
        ),
    }

    def values(found: Tensors, said: dict[str, Any]) -> Tensors:
        """Code times the power of two of its 32 columns."""
        if said.get("expert_dtype") != "fp4":
            raise ValueError("experts are not FP4")
        numbers = fp4_values(found[f"{expert}.weight"])
        return {expert: numbers * spread(exponents(found[f"{expert}.scale"]), tuple(numbers.shape), (1, 32))}

    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    block |= {"weight_block_size": [128, 128], "expert_dtype": "fp4"}  # type: ignore[dict-item]
    return QuantizedSource(tensors, block, values, {"model_type": "deepseek_v3", "hidden_size": N})


VARIANTS["deepseek-v4"] = _deepseek_v4
