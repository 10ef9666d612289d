"""Packed directories by transformers' own `from_pretrained` and `pipeline`, and under programs that know only those."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import tilewright
from tilewright.engines.transformers.__main__ import main
from tilewright.kernels.errors import CheckpointError, KernelUnavailableError
from tilewright.kernels.modules import PackedLinear
from tilewright.kernels.packed.safetensors_file import read_header

Call = Callable[..., Path]
MODELS = ("tiny-qwen3-moe", "tiny-deepseek-v3")
TOKENS = torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(TOKENS).logits
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scheme", ["int8", "block-fp8", "int4", "w4afp8"])
def test_from_pretrained_is_load_model(model: str, scheme: str, packed: Call) -> None:
    directory = packed(model, scheme)
    found = AutoModelForCausalLM.from_pretrained(directory)
    wanted: Any = tilewright.load_model(directory)
    assert torch.equal(logits(found), logits(wanted))
    assert {name: type(module) for name, module in found.named_modules()} == {
        name: type(module) for name, module in wanted.named_modules()
    }
    arguments = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(found.generate(TOKENS, **arguments), wanted.generate(TOKENS, **arguments))
    assert not found.training
    assert found.is_quantized


def model_of(kind: str) -> Any:
    """A small random model, whose tables (rotary frequencies, scale of embeddings) lie in no file."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["gemma3_text", "llama"])
def test_tied_heads_and_tables_in_no_file(kind: str, tmp_path: Path) -> None:
    model_of(kind).save_pretrained(tmp_path / "source")
    tilewright.pack(tmp_path / "source", tmp_path / "packed", progress=tilewright.Silent())
    tokens = TOKENS % 64
    for options in ({}, {"device_map": "cpu"}, {"dtype": "auto"}, {"dtype": torch.bfloat16}):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", **options)
        with torch.inference_mode():
            assert torch.equal(found(tokens).logits, tilewright.load_model(tmp_path / "packed")(tokens).logits)
    found.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "manifest.json").is_file()


def test_nothing_is_copied(packed: Call) -> None:
    """Weights are views of the mapped files: their addresses lie in a mapping of them."""
    directory = packed("tiny-qwen3-moe", "int8")
    model = AutoModelForCausalLM.from_pretrained(directory)
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(directory / "model.safetensors")):
            start, _, stop = line.split()[0].partition("-")
            mapped.append((int(start, 16), int(stop, 16)))
    tensors = [*model.parameters()] + [
        tensor for module in model.modules() if isinstance(module, PackedLinear) for tensor in module.tensors()
    ]
    assert len(tensors) > 20
    for tensor in tensors:
        assert any(start <= tensor.data_ptr() < stop for start, stop in mapped)


def test_pipeline(packed: Call) -> None:
    directory = packed("tiny-qwen3-moe", "int8")
    generate = pipeline("text-generation", model=str(directory), max_new_tokens=6, do_sample=False)
    (found,) = generate("The city of ", return_full_text=False)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer("The city of ", return_tensors="pt")
    model: Any = tilewright.load_model(directory)
    wanted = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert found["generated_text"] == tokenizer.decode(wanted, skip_special_tokens=True)


def test_other_models_load_as_before(tmp_path: Path) -> None:
    model = model_of("llama")
    model.save_pretrained(tmp_path / "plain")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(found.lm_head) is torch.nn.Linear
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


def test_refusals(packed: Call, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed("tiny-qwen3-moe", "int8"), tmp_path / "packed"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with pytest.raises(CheckpointError, match=r"dtype=torch.float16 is asked for, it is packed for bfloat16"):
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16)
    with pytest.raises(KernelUnavailableError, match="device_map names cpu, disk"):
        AutoModelForCausalLM.from_pretrained(directory, device_map={"model": "cpu", "lm_head": "disk"})
    file = directory / "model.safetensors"
    tensors, metadata = load_file(file), read_header(file).metadata
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][file.name]["size"] = file.stat().st_size
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"`model\.norm\.weight` is not in the files"):
        AutoModelForCausalLM.from_pretrained(directory)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="cut off"):
        AutoModelForCausalLM.from_pretrained(directory)


PROGRAM = """
import sys
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1]).lm_head).__name__)
"""


def test_a_program_that_knows_only_transformers(packed: Call, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tilewright.engines.transformers", "program", packed("tiny-qwen3-moe", "int8")]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert found.stdout == "PackedLinear\n", found.stderr


def test_what_is_run_as_a_program(
    packed: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", ["door", str(tmp_path / "program.py"), str(packed("tiny-qwen3-moe", "int8"))])
    main()
    assert capsys.readouterr().out == "PackedLinear\n"
    for arguments, reason in (([], "usage:"), (["no_such_program"], "no module of this name is installed")):
        monkeypatch.setattr(sys, "argv", ["door", *arguments])
        with pytest.raises(SystemExit, match=reason):
            main()
