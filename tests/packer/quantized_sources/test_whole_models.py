"""AWQ and GPTQ checkpoints with zero points are packed as they are, and run as the model of their own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tilewright

from .sources import awq_pack, pack_bits

GROUP = 64


def _codes(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """Codes [K, N], zero points and fp16 scales [G, N] of a weight [N, K], and the values that they stand for."""
    groups = weight.T.unflatten(0, (-1, GROUP))
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    values = (codes - zeros[:, None]) * scales.float()[:, None]
    return codes.flatten(0, 1).numpy().astype(int), zeros.numpy().astype(int), scales, values.flatten(0, 1).T


def _awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros, scales, values = _codes(weight)
    return {"qweight": awq_pack(codes), "qzeros": awq_pack(zeros), "scales": scales}, values


def _gptq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros, scales, values = _codes(weight)
    index = torch.arange(len(codes), dtype=torch.int32) // GROUP
    words = {"qweight": pack_bits(codes, 4), "qzeros": pack_bits((zeros - 1).T, 4).T.contiguous()}
    return words | {"scales": scales, "g_idx": index}, values


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_as_it_is_and_run(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    quantize, block = KINDS[kind]
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name.endswith("_proj.weight"):
            stored, values = quantize(parameter * 4)
            parameter.copy_(values)
            tensors |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in stored.items()}
        else:
            parameter.copy_(parameter.bfloat16())
            tensors[name] = parameter.bfloat16().clone()
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    document = json.loads(config.to_json_string(use_diff=False)) | {"quantization_config": block}
    document |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(document))

    tilewright.pack(source, tmp_path / "packed")
    assert tilewright.verify(source, tmp_path / "packed").passed
    packed = tilewright.load_model(tmp_path / "packed")
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        exact = model(tokens).logits
        rounded = model.bfloat16()(tokens).logits.float()
        found = packed(tokens).logits.float()
        generated = packed.generate(tokens, max_new_tokens=6, do_sample=False)
    assert generated.shape == (2, 30)
    bf16 = float((rounded - exact).norm() / exact.norm())
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < 3 * bf16  # activations are int8 there
