"""Unpacking gives back what was packed, byte for byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.pack.unpack import plan_unpack
from tilewright.packer.schemes import SCHEMES

FORMS = [("none", None)] + [(scheme.id, form) for scheme in SCHEMES.values() for form in scheme.checkpoint_formats]
Call = Callable[..., Path]
Differences = Callable[[Path, Path], list[str]]


@pytest.mark.parametrize(("scheme", "form"), FORMS)
@pytest.mark.parametrize("model", ["tiny-qwen3-moe", "tiny-deepseek-v3"])
def test_round_trip(
    model: str, scheme: str, form: str | None, quantized: Call, packed: Call, unpack: Call, differences: Differences
) -> None:
    back = unpack(packed(model, scheme, form))
    source = quantized(model, scheme, form)
    assert differences(source, back) == []
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_biases_and_a_tied_head(write: Call, pack: Call, unpack: Call, differences: Differences) -> None:
    query = "model.layers.0.self_attn.q_proj"
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{query}.weight": torch.randn(40, 72, generator=generator).to(torch.bfloat16),
        f"{query}.bias": torch.randn(40, generator=generator).to(torch.bfloat16),
        "model.embed_tokens.weight": torch.randn(50, 72, generator=generator).to(torch.bfloat16),
    }
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    source = write(tensors, **config)
    assert differences(source, unpack(pack(source))) == []


def test_a_plain_directory_is_refused(quantized: Call) -> None:
    (reject,) = plan_unpack(open_checkpoint(quantized("tiny-qwen3-moe", "none"))).rejects
    assert "no packed directory" in str(reject)


def test_modules_that_claim_the_same_source_are_refused(packed: Call, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed("tiny-qwen3-moe", "int8"), tmp_path / "packed"))
    file = directory / "model.safetensors"
    metadata = read_header(file).metadata
    modules = json.loads(metadata["tilewright.modules"])
    modules["model.layers.1.self_attn.o_proj"]["sources"] = ["model.layers.0.self_attn.o_proj"]
    modules["model.layers.2.self_attn.o_proj"]["sources"] = ["model"]
    tensors = load_file(file) | {"model.weight": torch.ones(3)}
    save_file(tensors, file, metadata | {"tilewright.modules": json.dumps(modules)})
    rejects = {reject.name: reject.reason for reject in plan_unpack(open_checkpoint(directory)).rejects}
    assert rejects.keys() == {f"model.layers.0.self_attn.o_proj.{t}" for t in ("weight", "weight_scale")} | {
        "model.weight"
    }


def test_tensors_that_are_not_what_their_module_needs(packed: Call, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed("tiny-qwen3-moe", "int8"), tmp_path / "packed"))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale"]
    tensors["model.layers.1.mlp.experts.w13.weight_scale"] = torch.tensor(1.0)
    save_file(tensors, file, read_header(file).metadata)
    rejects = [reject.name for reject in plan_unpack(open_checkpoint(directory)).rejects]
    assert rejects == ["model.layers.0.self_attn.o_proj.weight_scale", "model.layers.1.mlp.experts.w13.weight_scale"]
