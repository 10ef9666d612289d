"""What planning costs for each tensor of a model, counted: calls, memory, and how often anything is decided."""

from __future__ import annotations

import json
import math
import struct
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tilewright.packer.checkpoint.files import Checkpoint, open_checkpoint
from tilewright.packer.engine.job import RunOptions
from tilewright.packer.engine.preflight import prepare
from tilewright.packer.pack.ranks import plan_ranks
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.plan import Plan, kinds
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.summary import summarize

CONFIG = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
LIMIT_CALLS, LIMIT_BYTES = 400, 2800  # for each tensor, of all ranks together
BYTES = {"F8_E4M3": 1, "F32": 4, "BF16": 2}
Plans = Callable[[Checkpoint], list[Plan]]
JOBS: dict[str, Plans] = {
    "quantize": lambda checkpoint: [plan_quantize(checkpoint, QuantizeOptions("w4afp8"))],
    "pack": lambda checkpoint: plan_ranks(checkpoint, CpuTarget(), 1, 1),
    "tp": lambda checkpoint: plan_ranks(checkpoint, CpuTarget(), 2, 1),
    "ep": lambda checkpoint: plan_ranks(checkpoint, CpuTarget(), 1, 2),
}


def headers_only(root: Path, experts: int) -> Path:
    """Two layers of experts in block FP8, in four files of which only the headers are on disk."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG | {"n_routed_experts": experts}))
    shapes: dict[str, tuple[str, list[int]]] = {"lm_head.weight": ("BF16", [256, 512])}
    shapes["model.embed_tokens.weight"] = ("BF16", [256, 512])
    for layer in range(2):
        for expert in range(experts):
            for name, shape in (("gate", [256, 512]), ("up", [256, 512]), ("down", [512, 256])):
                module = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                shapes[f"{module}.weight"] = ("F8_E4M3", shape)
                shapes[f"{module}.weight_scale_inv"] = ("F32", [size // 128 for size in shape])
    names = list(shapes)
    for number in range(4):
        header: dict[str, Any] = {}
        end = 0
        for name in names[number::4]:
            dtype, shape = shapes[name]
            start, end = end, end + BYTES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        content = json.dumps(header).encode()
        with (root / f"model-{number + 1:05}-of-00004.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(content)) + content)
            file.truncate(8 + len(content) + end)
    return root


def dry_run(source: Path, output: Path, plans: Plans) -> list[Plan]:
    """All that a dry run does with headers."""
    checkpoint = open_checkpoint(source)
    made = plans(checkpoint)
    folders = [output] if len(made) == 1 else [output / f"rank-{rank}" for rank in range(len(made))]
    job = prepare(dict(zip(folders, made, strict=True)), checkpoint, RunOptions(jobs=1, memory=1 << 30))
    summarize(job, job.destinations[0])
    return made


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, Python's own included."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def peak(work: Callable[[], object]) -> int:
    """Bytes of Python objects that are in use at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("job", JOBS)
def test_each_further_tensor_costs_little(job: str, tmp_path: Path) -> None:
    plans = JOBS[job]
    small, large = (headers_only(tmp_path / str(count), count) for count in (64, 192))
    dry_run(small, tmp_path / "none", plans)  # whatever happens once
    works = [partial(dry_run, source, tmp_path / "none", plans) for source in (small, large)]
    tensors = 2 * (192 - 64) * 3 * 2
    fewer, more = map(calls, works)
    assert (more - fewer) / tensors < LIMIT_CALLS
    fewer, more = map(peak, works)
    assert (more - fewer) / tensors < LIMIT_BYTES


@pytest.mark.parametrize("job", JOBS)
def test_kinds_of_tasks_do_not_grow_with_the_model(job: str, tmp_path: Path) -> None:
    made = [dry_run(headers_only(tmp_path / str(n), n), tmp_path / "none", JOBS[job]) for n in (4, 32)]
    few, many = ([len(list(kinds(plan.tasks))) for plan in plans] for plans in made)
    assert few == many
    assert all(len(plan.tasks) > 4 * len(list(kinds(plan.tasks))) for plan in made[1])
