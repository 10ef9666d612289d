"""What vLLM serves from a packed directory is the model: beside vLLM's own bf16, and beside transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import BOUND, divergence

from tilewright.engines.transformers.model import load_model
from tilewright.kernels.packed.safetensors_file import read_header

Served = Callable[[str, str], Path]
FAMILIES = ("tiny-qwen3-moe", "qwen3", "deepseek", "mixtral", "gemma3", "gpt-oss")
WITHOUT_EXPERTS = {("qwen3", "w4afp8"), ("gemma3", "w4afp8")}
SCHEMES = ("int8", "block-fp8", "int4", "w4afp8")
OFTEN = {  # the rest are of the matrix
    *(("tiny-qwen3-moe", scheme) for scheme in SCHEMES),
    ("qwen3", "int8"),
    ("deepseek", "w4afp8"),
    ("mixtral", "block-fp8"),
    ("gemma3", "int4"),
    ("gpt-oss", "int8"),
}
ON_AVX2 = {("tiny-qwen3-moe", "none"), ("gemma3", "int4"), ("deepseek", "int8")}


def combinations(often: set[tuple[str, str]], schemes: tuple[str, ...]) -> list[Any]:
    """Every family with every scheme that is for it."""
    pairs = [(family, scheme) for family in FAMILIES for scheme in schemes if (family, scheme) not in WITHOUT_EXPERTS]
    return [pytest.param(*pair, marks=[] if pair in often else [pytest.mark.matrix]) for pair in pairs]


def by_transformers(directory: Path, prompts: list[list[int]]) -> torch.Tensor:
    """What `load_model` says: fp64 [T, V]."""
    model = load_model(directory)
    with torch.inference_mode():
        logits = model(torch.tensor(prompts)).logits[:, :-1]
    return logits.flatten(0, 1).double().log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bf16_is_as_vllms_own(family: str, engine: Any, served: Served, reference: Any) -> None:
    wanted = reference(family)
    assert -(wanted.exp() * wanted).sum(-1).mean() < 3, "not peaked: errors would not show"
    assert divergence(wanted, engine.distributions(served(family, "none"))) <= BOUND


@pytest.mark.parametrize(("family", "scheme"), combinations(OFTEN, SCHEMES))
def test_served_is_as_good_as_by_transformers(
    family: str, scheme: str, engine: Any, served: Served, reference: Any, prompts: list[list[int]]
) -> None:
    """Beside the source, the error is that of the files; two runs round activations apart, so they cannot be equal."""
    directory, wanted = served(family, scheme), reference(family)
    error = divergence(wanted, by_transformers(directory, prompts))
    assert divergence(wanted, engine.distributions(directory)) <= 1.1 * error + BOUND


@pytest.mark.parametrize(("family", "scheme"), combinations(ON_AVX2, ("none", *SCHEMES)))
def test_avx2(
    family: str, scheme: str, engine_avx2: Any, served: Served, reference: Any, prompts: list[list[int]]
) -> None:
    directory, wanted = served(family, scheme), reference(family)
    error = 0.0 if scheme == "none" else divergence(wanted, by_transformers(directory, prompts))
    assert divergence(wanted, engine_avx2.distributions(directory)) <= 1.1 * error + BOUND


@pytest.mark.parametrize("module", ["model.layers.2.self_attn.qkv_proj", "model.layers.1.mlp.experts.w2"])
def test_a_wrong_scale_shows(module: str, engine: Any, served: Served, reference: Any, tmp_path: Path) -> None:
    """The bound is not met by chance: one module of bf16 weights a quarter too large fails it."""
    family = "tiny-qwen3-moe"
    directory = tmp_path / "packed"
    shutil.copytree(served(family, "none"), directory)
    file = directory / "model.safetensors"
    entry = read_header(file).entries[f"{module}.weight"]
    raw = bytearray(file.read_bytes())
    weight = torch.frombuffer(raw, dtype=torch.bfloat16, offset=entry.start, count=entry.spec.nbytes // 2)
    weight *= 1.25
    file.write_bytes(raw)
    assert divergence(reference(family), engine.distributions(directory)) > BOUND


def test_compiled(engine: Any, served: Served, reference: Any) -> None:
    found = engine.distributions(served("tiny-qwen3-moe", "none"), enforce_eager=False)
    assert divergence(reference("tiny-qwen3-moe"), found) <= BOUND


@pytest.mark.parametrize("options", [{"enable_prefix_caching": True, "enable_chunked_prefill": True}])
def test_chunks_and_cached_prefixes(
    options: dict[str, Any], engine: Any, served: Served, prompts: list[list[int]]
) -> None:
    """Prompts in chunks of 32 tokens, the second half of them with cached prefixes, go on as whole ones do."""
    directory = served("qwen3", "int8")
    twice = [prompt * 2 for prompt in prompts] * 2
    whole = engine.ask(directory, prompts=twice, tokens=8)
    chunks = engine.ask(
        directory, prompts=twice, tokens=8, arguments=options | {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    )
    assert whole["tokens"] == chunks["tokens"]
