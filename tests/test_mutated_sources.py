"""Every job on damaged sources ends in an output that verifies, or in a message of ours: never in a raw exception."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tilewright
from tilewright.packer.progress import Silent

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    **{"moe_intermediate_size": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "num_local_experts": 4},
}
MODELS = ("qwen3", "qwen3_moe", "gpt2", "granitemoe")
WRONG: tuple[Any, ...] = (None, 0, -1, 1, 3, 7.5, "many", "", [], [1], {}, {"a": 1}, True, 1 << 40)
KINDS = ("missing", "renamed", "transposed", "cropped", "flattened", "deeper", "empty", "dtype", "scale")
SCHEMES = ("int8", "block-fp8", "int4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    roots = {}
    for kind in MODELS:
        roots[kind] = tmp_path_factory.mktemp("models") / kind
        config = AutoConfig.for_model(kind, **SIZES)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(roots[kind])
    return roots


def mutate_tensors(source: Path, draw: random.Random) -> str:
    path = source / "model.safetensors"
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kind = draw.choice((
        "missing",
        "renamed",
        "transposed",
        "cropped",
        "flattened",
        "deeper",
        "empty",
        "dtype",
        "scale",
    ))
    match kind:
        case "renamed":
            tensors[draw.choice((f"{name}.x", name.replace("0", "9"), "x", name.replace(".", "_")))] = tensor
        case "transposed":
            tensors[name] = tensor.T.contiguous() if tensor.dim() == 2 else tensor[::2].contiguous()
        case "cropped":
            tensors[name] = tensor[..., : max(tensor.shape[-1] // 2, 1)].contiguous()
        case "flattened":
            tensors[name] = tensor.flatten()
        case "deeper":
            tensors[name] = tensor[None].contiguous()
        case "empty":
            tensors[name] = tensor[:0].contiguous()
        case "dtype":
            types = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float64, torch.bool)
            tensors[name] = tensor.to(draw.choice(types))
        case "scale":
            tensors[name] = tensor
            tensors[name.replace("weight", "weight_scale")] = torch.ones(draw.randint(0, 3), draw.randint(0, 3))
    save_file(tensors, path, {"format": "pt"})
    return f"{kind} {name}"


def mutate_config(source: Path, draw: random.Random) -> str:
    path = source / "config.json"
    config = json.loads(path.read_text())
    key = draw.choice(sorted(config) + ["quantization_config", "text_config", "num_nextn_predict_layers"])
    config[key] = value = draw.choice(WRONG)
    path.write_text(json.dumps(config))
    return f"{key} = {value!r}"


def attempt(what: str, call: Any) -> Any:
    """The result of a call; None where it is refused. Anything but an error of ours fails."""
    try:
        return call()
    except tilewright.TilewrightError:
        return None
    except Exception as error:
        raise AssertionError(f"{what}: raw {type(error).__name__}: {error}") from error


def run_jobs(source: Path, output: Path, what: str, draw: random.Random) -> list[str]:
    done = []
    scheme = draw.choice(SCHEMES)
    made = [(output / "quantized", lambda to: tilewright.quantize(source, to, scheme, progress=Silent()))]
    made.append((output / "packed", lambda to: tilewright.pack(source, to, progress=Silent())))
    made.append((
        output / "cut",
        lambda to: tilewright.pack(source, to, tilewright.PackOptions(tp=2), progress=Silent()),
    ))
    attempt(f"inspect {what}", lambda: tilewright.inspect(source))
    for directory, job in made:
        if attempt(f"{directory.name} {what}", lambda job=job, directory=directory: job(directory)) is None:
            continue
        done.append(directory.name)
        if directory.name != "cut":
            verdict = attempt(f"verify {what}", lambda to=directory: tilewright.verify(source, to, progress=Silent()))
            assert verdict is not None, f"{directory.name} of {what} cannot be verified"
            assert verdict.passed, f"{directory.name} of {what}: {verdict.failures()}"
        if directory.name == "packed":
            attempt(f"load_model {what}", lambda to=directory: tilewright.load_model(to))
    return done


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_not_damaged_succeeds(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    done = run_jobs(models[kind], tmp_path, kind, random.Random(0))
    assert {"quantized", "packed"} <= set(done)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200))])
def test_damaged_sources(seed: int, models: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(seed)
    kind = draw.choice(MODELS)
    source = shutil.copytree(models[kind], tmp_path / "source")
    mutation = draw.choice((mutate_tensors, mutate_tensors, mutate_config))
    run_jobs(source, tmp_path, f"{kind} ({mutation(source, draw)})", draw)
