"""What one task does: its sources become bytes at their places in an output file."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.tensors import TensorSpec

from ..checkpoint.files import Checkpoint
from ..plan import AnyTask, Copy
from ..records.atomic import opened
from .identity import check_unchanged
from .shards import ShardPlan
from .writer import FileWriter


def run_task(
    checkpoint: Checkpoint, writer: FileWriter, shard: ShardPlan, task: AnyTask, lost_pages: Callable[[], int]
) -> None:
    """Carry out one task.

    Args:
        checkpoint: The source.
        writer: The file.
        shard: What it will hold.
        task: One of the shard's.
        lost_pages: Counts pages of the source that could not be read: see `page_guard`.

    Raises:
        CheckpointError: The source changed, or cannot be read.
        SchemeError: Its numbers cannot be converted.
    """
    files = {checkpoint.files[source.name] for source in task.sources}
    try:
        if isinstance(task.step, Copy):
            _copy(checkpoint, writer, shard, task)
        else:
            _compute(checkpoint, writer, shard, task)
        if lost := lost_pages():
            raise CheckpointError(
                f"{lost} pages of {', '.join(sorted(files))} could not be read",
                hint="the disk or the network of the source fails; use --resume when it is well again",
            )
    except Exception:  # numbers that make no sense may be those of a file that is being written
        check_unchanged(checkpoint, files)
        raise


def _copy(checkpoint: Checkpoint, writer: FileWriter, shard: ShardPlan, task: AnyTask) -> None:
    for source, piece in zip(task.sources, task.pieces, strict=True):
        path, start, size = checkpoint.extent(source)
        assert size == piece.spec.nbytes, f"{source} has {size} bytes, {piece} is planned"
        with opened(path) as fd:
            writer.copy(shard.offsets[piece.name] + piece.offset, fd, start, size, path)


def _compute(checkpoint: Checkpoint, writer: FileWriter, shard: ShardPlan, task: AnyTask) -> None:
    given = dict(task.run([checkpoint.tensor(source) for source in task.sources]))
    for source in task.sources:
        checkpoint.forget(source)
    for piece in task.pieces:
        tensor = given.pop(piece.name)
        got = TensorSpec.of(tensor)
        assert got == piece.spec, f"{piece.name}: {piece.spec} is planned, {task.step} gives {got}"
        writer.write(shard.offsets[piece.name] + piece.offset, tensor.contiguous())
    assert not given, f"{task.step} also gives {sorted(given)}, which is not planned"
