"""What makes two runs the same run: the hash of a plan, and what the source was when it was planned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tilewright
from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.page_guard import page_guard
from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES
from tilewright.kernels.tensors import TensorSpec

from ..checkpoint.files import Checkpoint
from ..checkpoint.gguf_file import read_again
from ..plan import Fate, Plan
from ..records.journal import Identity


def plan_hash(plan: Plan, checkpoint: Checkpoint, max_shard_size: int) -> str:
    """sha256 over everything that decides the output's bytes but the weights themselves; no path, no time.

    Options that are off are left out: a new one, off by default, does not make another run of an unfinished one.
    """
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")

    options = {name: value for name, value in plan.options.items() if value}
    add([tilewright.__version__, max_shard_size, options, plan.config, plan.modules, plan.metadata])
    add({name: hashlib.sha256(content).hexdigest() for name, content in plan.extra_files.items()})
    add({file: [header.size, header.digest] for file, header in checkpoint.headers.items()})
    for line in _lines(plan):
        digest.update(line.encode())
    return digest.hexdigest()


def _lines(plan: Plan) -> Iterator[str]:
    """One line for each output tensor, each task and each fate."""
    spelled: dict[int, str] = {}  # by the object: there are few specifications, and many tensors

    def spell(spec: TensorSpec) -> str:
        if id(spec) not in spelled:
            spelled[id(spec)] = f"{DTYPE_NAMES[spec.dtype]} {spec.shape}"
        return spelled[id(spec)]

    for name, spec in plan.tensors.items():
        yield f"{name} {spell(spec)}\n"
    for task in plan.tasks:
        sources = zip(task.inputs, task.first.sources, strict=True)
        pieces = zip(task.outputs, task.first.pieces, strict=True)
        read = "".join([f"{name} {source.index} " for name, source in sources])
        made = "".join([f"{n} {spell(p.spec)} {p.offset + task.place * p.spec.nbytes} " for n, p in pieces])
        yield f"{read}> {made}{type(task.first.step).__name__}\n"
    told: tuple[Fate | None, str] = (None, "")  # neighbours often share their fate
    for name in sorted(plan.fates):
        fate = plan.fates[name]
        if fate is not told[0]:
            told = fate, f"{fate.kind} {fate.reason} {fate.outputs}"
        yield f"{name} {told[1]}\n"


def source_identity(checkpoint: Checkpoint) -> dict[str, Identity]:
    """Size, header and time of the last change (in nanoseconds) of each source shard.

    Reading all weights again would cost as much as starting afresh; a tool that rewrites a shard and sets its time
    back is beyond this check.
    """
    return {
        file: (header.size, header.digest, header.stamp.mtime_ns) for file, header in sorted(checkpoint.headers.items())
    }


def check_unchanged(
    checkpoint: Checkpoint, files: Iterable[str] | None = None, *, headers: bool = False, but: Collection[str] = ()
) -> None:
    """Compare the source with what it was when it was opened: size, time of change and inode of each file.

    Args:
        checkpoint: The source.
        files: Shards to look at; None: all files of the source, `config.json` and side files included.
        headers: Read the headers of the shards again too.
        but: Shards that are not looked at.

    Raises:
        CheckpointError: Files changed; it names them.
    """
    changed = []
    for file in checkpoint.headers if files is None else files:
        header = checkpoint.headers[file]
        if file in checkpoint.gone or file in but:
            continue
        if reason := header.stamp.difference(header.path):
            changed.append(f"{header.path} {reason}")
        elif headers and read_again(header) != header.digest:
            changed.append(f"{header.path} has another header")
    for path, stamp in checkpoint.stamps.items() if files is None else ():
        if reason := stamp.difference(path):
            changed.append(f"{path} {reason}")
    if changed:
        more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
        raise CheckpointError(
            f"the source changed while it was read: {'; '.join(changed[:8])}{more}",
            hint="nothing may write to a checkpoint while it is read; wait until its writer is done, then start anew",
        )


def different_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Which options of a plan are not those of another, for people; None if all are the same."""
    before, now = json.loads(json.dumps(before)), json.loads(json.dumps(now))
    changed = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    told = [f"{_option(name)} {_value(before.get(name))}, now {_value(now.get(name))}" for name in changed]
    return f"with other options: {'; '.join(told)}" if told else None


def _option(name: str) -> str:
    spelled = {"form": "format", "text": "calibrate"}.get(name, name)
    return f"--{spelled.replace('_', '-')}"


def _value(value: Any) -> str:
    return "not given" if value is None or value == [] else json.dumps(value).strip('"')


@contextmanager
def reading(*checkpoints: Checkpoint) -> Iterator[None]:
    """Read checkpoints inside the block; what came of it counts only if the block ends without an error.

    Raises:
        CheckpointError: A file changed since it was opened, or a page of one could not be read.
    """
    with page_guard() as lost_pages:
        try:
            yield
        finally:  # numbers that make no sense may be those of a file that is being written
            for checkpoint in checkpoints:
                check_unchanged(checkpoint)
        if lost := lost_pages():
            places = ", ".join(str(checkpoint.root) for checkpoint in checkpoints)
            raise CheckpointError(
                f"{lost} pages of files in {places} could not be read",
                hint="the disk or the network that they lie on fails; try again when it is well",
            )
