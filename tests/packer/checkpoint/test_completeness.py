"""A source that says less or more than its config: refused, or told which file counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tilewright
from tilewright.packer.progress import Silent

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32},
}
Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / request.param
    config = AutoConfig.for_model(request.param, **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root)
    return root


def without(*parts: str) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return edit


def jobs(source: Path, output: Path) -> list[Callable[[], object]]:
    return [
        lambda: tilewright.quantize(source, output / "q", "int8", progress=Silent()),
        lambda: tilewright.pack(source, output / "p", progress=Silent()),
    ]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("layers.1.", "num_hidden_layers = 3, but there are 2 of the 3 layers; not 1"),
        ("layers.2.", "not 2"),
        ("layers.1.self_attn.v_proj", "has k_proj, q_proj, but no v_proj"),
        ("layers.0.self_attn.q_proj", "but no q_proj"),
        ("layers.0.mlp.up_proj", "no up_proj"),
        ("layers.0.mlp.experts.3.", "lacks 1 of 4 experts: 3"),
        ("layers.2.mlp.experts.1.down_proj", "experts.1: has no down_proj, others have"),
    ],
)
def test_what_is_missing_is_refused(part: str, reason: str, model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    count = len(tensors)
    without(part)(tensors)
    if len(tensors) == count:
        pytest.skip("this family has no such tensor")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for job in jobs(source, tmp_path):
        with pytest.raises(tilewright.TilewrightError, match=reason.replace("(", r"\(")):
            job()


def test_a_whole_source_is_taken(model: Path, tmp_path: Path) -> None:
    for job in jobs(model, tmp_path):
        job()


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "adapter_model.safetensors", "extra.safetensors"])
def test_the_file_that_transformers_reads_counts(beside: str, model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    save_file({"model.layers.0.stray.weight": torch.ones(4, 64)}, source / beside)
    result = tilewright.quantize(source, tmp_path / "out", "int8", progress=Silent())
    assert any(f"model.safetensors is what is read; ignored beside it: `{beside}`" in note for note in result.notes)
    assert "stray" not in (tmp_path / "out" / "ledger.json").read_text()


def test_several_files_that_nothing_orders_are_refused(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    (source / "model.safetensors").rename(source / "a.safetensors")
    save_file({"other": torch.ones(3)}, source / "b.safetensors")
    with pytest.raises(tilewright.CheckpointError, match="2 files of weights: `a.safetensors`, `b.safetensors`"):
        tilewright.quantize(source, tmp_path / "out", "int8", progress=Silent())


def test_shards_that_others_count_are_missed(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    tensors = list(load_file(source / "model.safetensors").items())
    (source / "model.safetensors").unlink()
    for number in (1, 2, 3):
        save_file(dict(tensors[number - 1 :: 3]), source / f"model-0000{number}-of-00003.safetensors", {"format": "pt"})
    tilewright.quantize(source, tmp_path / "whole", "int8", progress=Silent())
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(tilewright.CheckpointError, match="of 3 shards; fetch the others"):
        tilewright.quantize(source, tmp_path / "out", "int8", progress=Silent())


def test_a_config_that_counts_nothing_is_not_compared(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["num_hidden_layers"]
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    without("layers.1.")(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    tilewright.quantize(source, tmp_path / "out", "int8", progress=Silent())
