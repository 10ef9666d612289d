"""GGUF files, written by the gguf package from models of transformers, are read as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tilewright.kernels.errors import TilewrightError
from tilewright.packer.checkpoint.files import Checkpoint, open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.job import RunOptions
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.verify.weights import compare_weights

gguf = pytest.importorskip("gguf", reason="the gguf package (extra `gguf`) is not installed")
HIDDEN, INNER, LAYERS, VOCABULARY = 256, 512, 2, 64
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # architecture -> model_type, further sizes
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "qwen2moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1}),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"head_dim": 32, "decoder_sparse_step": 1}),
}
METADATA = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "vocab_size": "vocab_size",
}
Blocks = Callable[[np.ndarray, str], np.ndarray]


def random_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Any bytes that are blocks of this type and stand for finite numbers."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(values.size)
    raw = random.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    for _ in range(100):
        with np.errstate(all="ignore"):
            numbers = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        bad = ~(np.abs(numbers) < 1e6).all(1)
        if not bad.any():
            break
        raw[bad] = random.integers(0, 256, (int(bad.sum()), size), dtype=np.uint8)
    return raw.reshape(*values.shape[:-1], -1)


def quantized(values: np.ndarray, kind: str) -> np.ndarray:
    """Rounded to a type that the package itself quantizes to."""
    return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter lays out the rows of q and k for its rope."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_model(path: Path, architecture: str, kind: str, make: Blocks, **more: Any) -> Mapping[str, torch.Tensor]:
    """A random model of transformers as GGUF, its matrices of one type; its state dict."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = MODELS[architecture]
    config = AutoConfig.for_model(model_type, **SIZES | sizes)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, said in METADATA.items():
        if isinstance(value := getattr(config, said, None), int):
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 7)
    if architecture == "llama":
        writer.add_uint32("llama.rope.dimension_count", HIDDEN // 8)
    for key, value in more.items():
        writer.add_string(key.replace("__", "."), value)
    table = gguf.get_tensor_name_map(next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture), 2)
    for name, tensor in _apart(state).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        values = tensor.numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = paired(values, 8 if stem.endswith("q_proj") else 2)
        theirs = f"{table.get_name(stem)}.{suffix}"
        if theirs.endswith("ffn_gate_inp_shexp.weight"):
            values = values.reshape(-1)
        if values.ndim > 1 and "gate_inp" not in theirs:
            writer.add_tensor(theirs, make(values, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def _apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as the file has them: a stack for each projection."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            found[f"{stem}gate_proj.weight"], found[f"{stem}up_proj.weight"] = tensor.chunk(2, 1)
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def as_transformers_reads(path: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Names and values that transformers makes of a file, experts one by one."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        container, _, last = name.rpartition(".experts.")
        if not container:
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            stem = f"{container}.experts.{expert}"
            if last.startswith("gate_up"):
                found[f"{stem}.gate_proj.weight"], found[f"{stem}.up_proj.weight"] = matrix.chunk(2, 0)
            else:
                found[f"{stem}.down_proj.weight"] = matrix
    return found


@pytest.mark.parametrize("architecture", MODELS)
def test_names_values_and_config_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, architecture, "Q6_K", random_blocks)
    checkpoint = open_checkpoint(path)
    expected = as_transformers_reads(path, checkpoint.config)
    found = {name: weight.values() for name, weight in read_contents(checkpoint).weights.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.float().reshape(found[name].shape)), name
    model_type, sizes = MODELS[architecture]
    said = checkpoint.config
    stated = {key: said[key] for key in (SIZES | sizes) if key in said}
    assert stated == {key: value for key, value in (SIZES | sizes).items() if key in stated}
    assert len(stated) >= 7
    assert (said["model_type"], said["eos_token_id"]) == (model_type, 7)
    assert said["tie_word_embeddings"] is sizes.get("tie_word_embeddings", False)


TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "F16", "BF16", "F32"),
)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_read_as_its_library_reads_it(kind: str, tmp_path: Path) -> None:
    """And, where transformers has a reading of its own, as that does."""
    from transformers.integrations.gguf import dequant

    path = tmp_path / "model.gguf"
    make = quantized if kind in {"F16", "BF16", "F32"} else random_blocks
    write_model(path, "llama", kind, make)
    weights = read_contents(open_checkpoint(path)).weights
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}["blk.1.ffn_down.weight"]
    found = weights["model.layers.1.mlp.down_proj.weight"].values()
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(stored.data.copy(), stored.tensor_type)))
    if stored.tensor_type.name in dequant.GGML_NAME.values():
        other = dequant.dequantize(torch.from_numpy(stored.data.copy()), int(stored.tensor_type))
        assert torch.equal(found, other.reshape(found.shape))


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_quantized_and_verified(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "source"
    root.mkdir()
    state = write_model(root / "model.gguf", "llama", kind, quantized)
    (root / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(root)
    plan = plan_quantize(checkpoint, QuantizeOptions("int8"))
    assert not plan.rejects
    execute(plan, checkpoint, tmp_path / "out")
    output = open_checkpoint(tmp_path / "out")
    results = [result for result, _ in compare_weights(read_contents(checkpoint), read_contents(output))]
    assert len(results) == len(state)
    assert {result.status for result in results} <= {"ok", "equal"}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    near = tensors["model.embed_tokens.weight"].float() - state["model.embed_tokens.weight"]
    assert near.norm() < 0.02 * state["model.embed_tokens.weight"].norm()
    assert not (tmp_path / "out" / "model.gguf").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "w8a8_int8"


def _refused(checkpoint: Checkpoint) -> str:
    return " ".join(map(str, plan_pack(checkpoint, CpuTarget()).rejects))


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    outside, tmp_path = tmp_path / "out", tmp_path / "source"
    tmp_path.mkdir()
    path = tmp_path / "model.gguf"
    write_model(path, "llama", "Q4_K", random_blocks)
    checkpoint = open_checkpoint(path)
    assert "no packed layout holds GGUF-Q4_K; convert it with `quantize-model` first" in _refused(checkpoint)
    with pytest.raises(TilewrightError, match=r"--consume needs a source that headers describe; `model\.gguf`"):
        execute(plan_quantize(checkpoint, QuantizeOptions("int8")), checkpoint, outside, RunOptions(consume=True))
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(TilewrightError, match="holds 2 models as GGUF"):
        open_checkpoint(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(TilewrightError, match="cannot be read as GGUF"):
        open_checkpoint(tmp_path / "other.gguf")
    (tmp_path / "part-00001-of-00002.gguf").write_bytes(path.read_bytes())
    with pytest.raises(TilewrightError, match=r"1 of 2 files are missing: part-00002-of-00002\.gguf"):
        open_checkpoint(tmp_path / "part-00001-of-00002.gguf")
    scaled = tmp_path / "scaled.gguf"
    write_model(scaled, "llama", "Q4_K", random_blocks, llama__rope__scaling__type="yarn")
    with pytest.raises(TilewrightError, match=r"`llama\.rope\.scaling\.type` is set"):
        open_checkpoint(scaled)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    assert read_contents(open_checkpoint(scaled)).weights
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config | {"model_type": "gemma"}))
    with pytest.raises(TilewrightError, match="config.json beside it says model_type `gemma`"):
        open_checkpoint(scaled)


@pytest.mark.parametrize("architecture", ["gemma2", "phi3"])
def test_an_architecture_that_is_not_known_is_named(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(TilewrightError, match=f"the architecture `{architecture}` is not read; known: llama"):
        open_checkpoint(tmp_path)
