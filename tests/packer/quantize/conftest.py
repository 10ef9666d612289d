"""Small checkpoints on disk, and conversions of them carried out step by step, without the pipeline."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.kernels.tensors import TensorSpec
from tilewright.packer.checkpoint.files import Checkpoint
from tilewright.packer.plan import Copy, Plan
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

QWEN_MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256}
MODELS = Path(__file__).parents[3] / "examples" / "models"


@dataclass(frozen=True)
class Converted:
    """A plan and what its steps gave."""

    plan: Plan
    tensors: dict[str, torch.Tensor]


def open_directory(root: Path) -> Checkpoint:
    """A checkpoint from every shard of a directory."""
    headers = {path.name: read_header(path) for path in sorted(root.glob("*.safetensors"))}
    files = {name: file for file, header in headers.items() for name in header.entries}
    config = json.loads((root / "config.json").read_text())
    return Checkpoint(root, config, headers, files, ())


def execute(plan: Plan, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Run every task of a plan in memory and check that it gives exactly what was planned."""
    assert not plan.rejects, "\n".join(map(str, plan.rejects))
    tensors: dict[str, torch.Tensor] = {}
    for task in plan.tasks:
        sources = [checkpoint.tensor(source) for source in task.sources]
        copied = isinstance(task.step, Copy)
        made = {task.pieces[0].name: sources[0]} if copied else task.run(sources)
        assert {piece.name: piece.spec for piece in task.pieces} == {
            name: TensorSpec.of(tensor) for name, tensor in made.items()
        }
        assert all(tensor.is_contiguous() for tensor in made.values())
        assert not set(made) & set(tensors)
        tensors |= made
    assert {name: TensorSpec.of(tensor) for name, tensor in tensors.items()} == plan.tensors
    assert set(plan.fates) == set(checkpoint.files)
    return tensors


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    """(tensors, config=..., shards=1) -> an opened checkpoint in a fresh directory."""

    def make(
        tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, shards: int = 1
    ) -> Checkpoint:
        root = tmp_path / f"source-{len(list(tmp_path.iterdir()))}"
        root.mkdir()
        (root / "config.json").write_text(json.dumps(QWEN_MOE if config is None else config))
        names = list(tensors)
        for shard in range(shards):
            part = {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in names[shard::shards]}
            save_file(part, root / f"model-{shard + 1:05}-of-{shards:05}.safetensors")
        return open_directory(root)

    return make


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """(checkpoint, scheme, **options) -> the plan."""

    def make(checkpoint: Checkpoint, scheme: str, **options: Any) -> Plan:
        return plan_quantize(checkpoint, QuantizeOptions(scheme, **options))

    return make


@pytest.fixture
def convert(plan: Callable[..., Plan]) -> Callable[..., Converted]:
    """(checkpoint, scheme, **options) -> plan and output tensors."""

    def run(checkpoint: Checkpoint, scheme: str, **options: Any) -> Converted:
        made = plan(checkpoint, scheme, **options)
        return Converted(made, execute(made, checkpoint))

    return run


@pytest.fixture(params=["tiny-qwen3-moe", "tiny-deepseek-v3"])
def tiny_model(request: pytest.FixtureRequest) -> Checkpoint:
    """Each of the shipped models."""
    return open_directory(MODELS / request.param)
