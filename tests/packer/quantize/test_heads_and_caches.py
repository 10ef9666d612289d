"""Tied heads in lists of exceptions; heads, embeddings and routers that come quantized; scales of the KV cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tilewright
from tilewright.packer.families.cache_scales import cache_scales
from tilewright.packer.progress import Silent

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"vocab_size": 128, "ffn_dim": 128, "word_embed_proj_dim": 128, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def write(root: Path, kind: str, **further: object) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(SIZES | further))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root)
    return root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "opt", "falcon"])
def test_tied_models_load_in_transformers_and_verify(kind: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", kind, tie_word_embeddings=True)
    options = tilewright.QuantizeOptions("int8", checkpoint_format="compressed-tensors")
    tilewright.quantize(source, tmp_path / "int8", options, progress=Silent())
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert "lm_head" in config["quantization_config"]["ignore"]
    tilewright.pack(tmp_path / "int8", tmp_path / "packed", progress=Silent())
    assert tilewright.verify(source, tmp_path / "packed", progress=Silent()).passed
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "int8", dtype=torch.float32)(ids).logits
    assert (found - wanted).norm() <= 0.05 * wanted.norm()


def quantized_to_fp8(source: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Quantize further matrices of a source by hand, per channel; returns the values that they stand for."""
    tensors = load_file(source / "model.safetensors")
    values = {}
    for name in names:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale")] = scale
        values[name] = tensors[name].float() * scale
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "w8a8_fp8"}
    (source / "config.json").write_text(json.dumps(config))
    return values


NAMES = ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight")


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
    return write(tmp_path / "mixture", "qwen3_moe", num_key_value_heads=2, **moe)


def test_heads_embeddings_and_routers_are_dequantized(mixture: Path, tmp_path: Path) -> None:
    values = quantized_to_fp8(mixture, NAMES)
    tilewright.quantize(mixture, tmp_path / "int8", "int8", progress=Silent())
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    for name, expected in values.items():
        assert torch.equal(tensors[name], expected.to(torch.bfloat16)), name
        assert f"{name}_scale" not in tensors
    assert tilewright.verify(mixture, tmp_path / "int8", progress=Silent()).passed
    tilewright.pack(tmp_path / "int8", tmp_path / "packed", progress=Silent())
    assert tilewright.verify(mixture, tmp_path / "packed", progress=Silent()).passed
    asked = tilewright.QuantizeOptions("int8", include=("lm_head",))
    tilewright.quantize(mixture, tmp_path / "asked", asked, progress=Silent())
    assert load_file(tmp_path / "asked" / "model.safetensors")["lm_head.weight"].dtype == torch.int8


def test_packing_dequantizes_what_is_not_packed(mixture: Path, tmp_path: Path) -> None:
    values = quantized_to_fp8(mixture, NAMES[1:])
    tilewright.pack(mixture, tmp_path / "packed", progress=Silent())
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    for name, expected in values.items():
        assert torch.equal(tensors[name], expected.to(torch.bfloat16)), name
    assert tilewright.verify(mixture, tmp_path / "packed", progress=Silent()).passed


ATTENTION = "model.layers.0.self_attn"
SPELLINGS = [
    (("k_scale", "v_scale"), {"k_scale": 0, "v_scale": 1}),
    (("attn.k_scale", "attn.v_scale"), {"k_scale": 0, "v_scale": 1}),
    (("k_proj.k_scale", "v_proj.v_scale"), {"k_scale": 0, "v_scale": 1}),
    (("k_proj.output_scale", "v_proj.output_scale"), {"k_scale": 0, "v_scale": 1}),
    (("kv_scale",), {"k_scale": 0, "v_scale": 0}),
]


@pytest.mark.parametrize(("stored", "wanted"), SPELLINGS)
@pytest.mark.parametrize("form", ["native", "compressed-tensors"])
def test_scales_of_the_cache_are_carried(
    form: str, stored: tuple[str, ...], wanted: dict[str, int], tmp_path: Path
) -> None:
    source = write(tmp_path / "source", "llama")
    tensors = load_file(source / "model.safetensors")
    scales = [torch.tensor([0.5 + number]) for number in range(len(stored))]
    tensors |= {f"{ATTENTION}.{name}": scale for name, scale in zip(stored, scales, strict=True)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    options = tilewright.QuantizeOptions("block-fp8", checkpoint_format=form)
    tilewright.quantize(source, tmp_path / "out", options, progress=Silent())
    found = load_file(tmp_path / "out" / "model.safetensors")
    mine = {name: float(found[name]) for name in found if name.startswith(ATTENTION) and "weight" not in name}
    carried = {name.removeprefix(f"{ATTENTION}."): value for name, value in mine.items()}
    assert carried == {name: float(scales[number]) for name, number in wanted.items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if form == "compressed-tensors":
        assert config["kv_cache_scheme"]["type"] == "float"
    assert tilewright.verify(source, tmp_path / "out", progress=Silent()).passed
    tilewright.pack(tmp_path / "out", tmp_path / "packed", progress=Silent())
    assert tilewright.verify(source, tmp_path / "packed", progress=Silent()).passed
    assert tilewright.load_model(tmp_path / "packed") is not None


@pytest.mark.parametrize("name", [f"{ATTENTION}.q_proj.weight_scale", "layers.0.mlp.k_scale", f"{ATTENTION}.bias"])
def test_other_scales_keep_their_names(name: str) -> None:
    assert cache_scales(name) == ()


def test_w4afp8_of_a_dense_model_names_block_fp8(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "llama")
    notes = tilewright.quantize(source, tmp_path / "out", "w4afp8", progress=Silent()).notes
    assert any("no routed experts" in note and "block-fp8" in note for note in notes)
