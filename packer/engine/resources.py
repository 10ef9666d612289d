"""What a job needs of memory and disk, and what there is."""

from __future__ import annotations

import heapq
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..checkpoint.files import Checkpoint
from ..limits import available_memory, cpu_count
from ..plan import AnyTask, Plan, kinds
from .shards import ShardPlan

BASE_MEMORY = 300 << 20  # bytes: torch itself, headers, buffers
SPARE_DISK = 1 << 20  # bytes: index, ledger, manifest, directories, rounding to blocks


def task_memory(task: AnyTask, checkpoint: Checkpoint) -> int:
    """Bytes that a task allocates at most, as its step estimates."""
    specs = []
    for source in task.first.sources:
        spec = checkpoint.spec(source.name)
        specs.append(spec if source.index is None else replace(spec, shape=spec.shape[1:]))
    return task.first.step.memory(specs, sum(piece.spec.nbytes for piece in task.first.pieces))


def memory_plan(
    plans: Sequence[Plan], checkpoint: Checkpoint, jobs: int | None, memory: int | None
) -> tuple[int, int, int]:
    """How many tasks run at once and what they may need.

    Args:
        plans: The tasks.
        checkpoint: Their sources.
        jobs: Tasks at once that are wished for; None: one for each CPU that this process may use.
        memory: Bytes that the process may allocate; None: four fifths of what is available.

    Returns:
        Number of workers; bytes that the tasks may need together, at least as much as the largest one does, so that
        it can run alone; bytes that the process will need at most by estimate, what comes before the tasks included.
    """
    memory = available_memory() * 4 // 5 if memory is None else memory
    found = [(task_memory(task, checkpoint), count) for plan in plans for task, count in kinds(plan.tasks)]
    workers = max(1, min(jobs or cpu_count(), sum(count for _, count in found)))
    sizes = heapq.nlargest(workers, (size for size, count in found for _ in range(min(count, workers))))
    budget = max(memory - BASE_MEMORY, *sizes[:1], 0)
    return workers, budget, BASE_MEMORY + max(min(budget, sum(sizes[:workers])), *(plan.memory for plan in plans))


def disk_free(output: Path) -> int:
    """Bytes that can be written where `output` lies or will lie."""
    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    return shutil.disk_usage(place).free


def disk_needed(shards: Sequence[ShardPlan], checkpoint: Checkpoint, output: Path, consume: bool) -> int:
    """Bytes that writing `shards`, in this order, occupies at its peak, beside what lies in `output` and is reused.

    With `consume`, deleted source shards make room; the count allows for two output shards being written at a time.
    """
    reads = [source_files(shard, checkpoint) for shard in shards]
    waiting = Counter(file for files in reads for file in files)
    freed = [0]
    for files in reads:
        done = 0
        for file in files:
            waiting[file] -= 1
            path = checkpoint.headers[file].path
            if waiting[file] == 0 and consume and file not in checkpoint.gone and _same_device(path, output):
                done += path.stat().st_blocks * 512
        freed.append(freed[-1] + done)
    peak = used = 0
    for number, shard in enumerate(shards):
        used += shard.size
        peak = max(peak, used - freed[max(number - 1, 0)])
    side = sum((checkpoint.root / path).stat().st_size for path in checkpoint.side_files)
    there = sum(path.stat().st_blocks * 512 for path in output.rglob("*") if path.is_file()) if output.exists() else 0
    return max(peak + side + SPARE_DISK - there, 0)


def source_files(shard: ShardPlan, checkpoint: Checkpoint) -> set[str]:
    """Names of the source shards that an output shard is made of."""
    return {checkpoint.files[name] for task in shard.tasks for name in task.inputs}


def _same_device(path: Path, output: Path) -> bool:
    place = next(p for p in (output.absolute(), *output.absolute().parents) if p.exists())
    return path.stat().st_dev == place.stat().st_dev
