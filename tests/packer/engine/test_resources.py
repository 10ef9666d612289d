"""What a run needs of memory and disk: by estimate, and measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tilewright.kernels.tensors import TensorSpec
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.job import RunOptions
from tilewright.packer.engine.preflight import prepare
from tilewright.packer.engine.resources import BASE_MEMORY, disk_needed, memory_plan, task_memory
from tilewright.packer.engine.shards import plan_shards
from tilewright.packer.estimate import compute_seconds
from tilewright.packer.limits import available_memory
from tilewright.packer.plan import Copy, Plan, Step, Work

MakePlan = Callable[..., Plan]
LARGEST = (4096, 8192)  # 64 MiB in bf16


def test_anonymous_memory_stays_below_the_bound(tmp_path: Path, peak_anonymous: Callable[..., int]) -> None:
    """300 MiB and twice the largest quantized tensor for each worker, however large the rest is."""
    weight = torch.randn(LARGEST).bfloat16()
    names = [f"model.layers.{i}.mlp.{m}_proj.weight" for i in range(2) for m in ("gate", "up")]
    tensors = {name: weight.clone() for name in names} | {"model.embed_tokens.weight": torch.ones(24576, 8192).half()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    command = [str(Path(sys.executable).parent / "quantize-model"), str(source), str(tmp_path / "out")]
    command += ["--scheme", "int4", "--solver", "rtn", "--jobs", "2"]
    peak = peak_anonymous(command)
    assert 50 << 20 < peak < (300 << 20) + 2 * 2 * weight.nbytes


def test_memory_lowers_the_number_of_tasks(make_source: Callable[..., Path], make_plan: MakePlan) -> None:
    checkpoint = open_checkpoint(make_source())
    plan = make_plan(checkpoint)
    sizes = [task_memory(task, checkpoint) for task in plan.tasks]
    for memory in (1, BASE_MEMORY, BASE_MEMORY + 3 * max(sizes), None):
        workers, budget, peak = memory_plan([plan], checkpoint, 4, memory)
        assert workers == 4
        assert budget >= max(sizes)
        assert peak <= max(memory or available_memory(), BASE_MEMORY + max(sizes))


def test_disk_is_what_the_files_take(make_source: Callable[..., Path], make_plan: MakePlan, tmp_path: Path) -> None:
    source = make_source(shards=3)
    checkpoint = open_checkpoint(source)
    shards = plan_shards(make_plan(checkpoint), 6000)
    total = sum(shard.size for shard in shards)
    whole = disk_needed(shards, checkpoint, tmp_path / "out", consume=False)
    assert total < whole < total + (2 << 20)
    assert disk_needed(shards, checkpoint, tmp_path / "out", consume=True) < whole


def test_consume_counts_only_what_is_freed_in_time(tmp_path: Path, make_plan: MakePlan) -> None:
    """Shard by shard, with two output shards on disk before the first source shard is deleted."""
    source = tmp_path / "source"
    source.mkdir()
    for i in range(1, 9):
        save_file({f"t{i}": torch.zeros(1 << 20)}, source / f"model-{i:05}-of-00008.safetensors")  # 4 MiB, copied
    (source / "config.json").write_text("{}")
    checkpoint = open_checkpoint(source)
    shards = plan_shards(make_plan(checkpoint), 1 << 22)
    assert len(shards) == 8
    needed = disk_needed(shards, checkpoint, tmp_path / "out", consume=True)
    assert 2 << 22 <= needed < 3 << 22


def test_the_job_says_what_it_needs(make_source: Callable[..., Path], make_plan: MakePlan, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_source())
    job = prepare({tmp_path / "out": make_plan(checkpoint)}, checkpoint, RunOptions(jobs=3))
    assert (job.workers, job.finished) == (3, False)
    assert 0 < job.disk_needed < job.disk_free
    assert job.peak_memory > BASE_MEMORY


@dataclass(frozen=True)
class Heavy(Step):
    """Says for itself what it needs, unlike any step of ours."""

    trials: list[torch.Tensor]

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError

    def memory(self, sources: Sequence[TensorSpec], results: int) -> int:
        return 7 * sum(spec.nbytes for spec in sources) + results

    def work(self) -> Iterable[Work]:
        return (Work(("heavy",), 3 << 20, self.trials.append), Work(("heavy",), 5 << 20, self.trials.append))


def test_steps_state_their_own_memory_and_work(make_source: Callable[..., Path], make_plan: MakePlan) -> None:
    checkpoint = open_checkpoint(make_source())
    plan = make_plan(checkpoint)
    assert compute_seconds(plan, 1) == 0  # its steps state no work
    tasks = [task for task in plan.tasks if not isinstance(task.step, Copy)]
    heavy = Heavy([])
    for task in tasks:
        needs = sum(checkpoint.spec(source.name).nbytes for source in task.sources if source.index is None)
        results = sum(piece.spec.nbytes for piece in task.pieces)
        if all(source.index is None for source in task.sources):
            assert task_memory(replace(task, step=heavy), checkpoint) == 7 * needs + results
    assert compute_seconds(replace(plan, tasks=tuple(replace(task, step=heavy) for task in tasks)), 2) > 0
    assert len(heavy.trials) == 3  # one kind of work is timed once, as the best of three
