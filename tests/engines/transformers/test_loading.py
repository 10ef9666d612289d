"""What `load_model` makes of tensors in no file, of fp32 norms, of code in the directory, and of `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tilewright
from tilewright.kernels.errors import CheckpointError

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
TOKENS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))


def pack(model: Any, directory: Path, changed: dict[str, torch.Tensor] | None = None) -> Path:
    """A packed directory of a model in bf16, some of its tensors replaced."""
    source = directory / "source"
    model.to(torch.bfloat16).save_pretrained(source)
    if changed:
        file = source / "model.safetensors"
        save_file(load_file(file) | changed, file, {"format": "pt"})
    tilewright.pack(source, directory / "packed", progress=tilewright.Silent())
    return directory / "packed"


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **HEADS, **options)).eval()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() > 1 else 1
    return model


def error(model: Any, wanted: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(TOKENS).logits.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "llama"])
def test_tables_in_no_file_are_computed(kind: str, tmp_path: Path) -> None:
    """Scales of embeddings, rotary frequencies: as good as transformers in bf16 against its fp32."""
    packed = pack(model_of(kind), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(TOKENS).logits
    theirs = error(AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16), wanted)
    model = tilewright.load_model(packed)
    assert error(model, wanted) <= 2 * theirs
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.zero_()
    assert error(model, wanted) > 10 * theirs, "the comparison sees what a table of zeros does"


@pytest.mark.parametrize("fused", [True, False])
def test_norms_of_queries_in_fp32(fused: bool, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "k_norm")]
    weights = {name: 1 + torch.rand(16, generator=torch.Generator().manual_seed(1)) for name in names}
    packed = pack(model_of("qwen3"), tmp_path, weights)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(TOKENS).logits
    theirs = error(AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16), wanted)
    assert error(tilewright.load_model(packed, fused=fused), wanted) <= 2 * theirs


def test_save_pretrained_copies_the_directory(tmp_path: Path) -> None:
    model: Any = tilewright.load_model(pack(model_of("llama"), tmp_path))
    model.save_pretrained(tmp_path / "copy")
    again = tilewright.load_model(tmp_path / "copy", verify_checksums=True)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    with pytest.raises(CheckpointError, match="is there already"):
        model.save_pretrained(tmp_path / "copy")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OddConfig(LlamaConfig):
    model_type = "odd_llama"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


def test_code_of_the_directory_runs_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks a question"))
    packed = pack(model_of("llama"), tmp_path)
    config = json.loads((packed / "config.json").read_text())
    classes = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    config |= {"model_type": "odd_llama", "architectures": ["OddForCausalLM"], "auto_map": classes}
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "odd.py").write_text(CODE)
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        tilewright.load_model(packed)
    assert type(tilewright.load_model(packed, trust_remote_code=True)).__name__ == "OddForCausalLM"
