"""What a run writes down so that a later one can go on where it stopped.

The journal lies in `<output>/.tilewright-partial/` beside the unfinished files. Its first line says what the run is:
the hash of the plan, and size, header and time of the last change of every source shard. Each further line is a
finished shard. A line counts once it is complete, and it is written after the shard is safe on disk; so after a crash
at any moment the journal is true, and what it does not name is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tilewright
from tilewright.kernels.errors import PlanError
from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES

from ..checkpoint.files import Checkpoint
from ..plan import Plan

PARTIAL = ".tilewright-partial"


@dataclass(frozen=True)
class FileRecord:
    """A finished file: size in bytes and sha256 in hexadecimal."""

    size: int
    sha256: str


def kept_headers(output: Path) -> Path:
    """Where a run with `--consume` keeps the headers of source shards.

    Each is a file as long as its shard that holds the header and otherwise occupies no disk.
    """
    return output / PARTIAL / "source"


def plan_hash(plan: Plan, checkpoint: Checkpoint, max_shard_size: int) -> str:
    """sha256 over everything that decides the output's bytes but the weights themselves; no path, no time."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")

    add([tilewright.__version__, max_shard_size, plan.options, plan.config, plan.modules, plan.metadata])
    add({name: hashlib.sha256(content).hexdigest() for name, content in plan.extra_files.items()})
    add({file: [header.size, header.digest] for file, header in checkpoint.headers.items()})
    for name, spec in plan.tensors.items():
        add([name, DTYPE_NAMES[spec.dtype], spec.shape])
    for task in plan.tasks:
        sources = [[source.name, source.index] for source in task.sources]
        pieces = [[p.name, DTYPE_NAMES[p.spec.dtype], p.spec.shape, p.offset] for p in task.pieces]
        add([sources, pieces, type(task.step).__name__])
    for name, fate in sorted(plan.fates.items()):
        add([name, fate.kind, fate.reason, fate.outputs])
    return digest.hexdigest()


def source_identity(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """Size, header and time of the last change (in nanoseconds) of each source shard.

    Reading all weights again would cost as much as starting afresh; a tool that rewrites a shard and sets its time
    back is beyond this check.
    """
    return {
        file: [header.size, header.digest, header.path.stat().st_mtime_ns]
        for file, header in sorted(checkpoint.headers.items())
    }


def finished_files(output: Path) -> dict[str, FileRecord]:
    """The finished shards that the journal in `output` names; none if there is no journal."""
    try:
        content = (output / PARTIAL / "journal").read_bytes()
    except FileNotFoundError:
        return {}
    return _parse(output, content)[1]


def _parse(output: Path, content: bytes) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    """What the run is, empty if the journal never began, and its finished shards; a torn last line does not count."""
    try:
        lines = [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
        if not lines:
            return {}, {}
        if not isinstance(lines[0]["plan"], str) or not isinstance(lines[0]["source"], dict):
            raise TypeError("no plan")
        return lines[0], {line["file"]: FileRecord(line["size"], line["sha256"]) for line in lines[1:]}
    except (ValueError, KeyError, TypeError) as error:
        hint = "start anew with --overwrite"
        raise PlanError(f"{output / PARTIAL}: the journal is damaged: {error!r}", hint=hint) from error


class Journal:
    """The journal of one output directory, open and locked against a second run."""

    def __init__(self, output: Path, plan: str, source: dict[str, list[Any]], *, resume: bool) -> None:
        self.folder = output / PARTIAL
        self.finished: dict[str, FileRecord] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.folder / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock(output)
            before, finished = self._read(output) if resume else ({}, {})
            if before:
                self._check(output, before, plan, source)
                self.finished = finished
            else:
                os.ftruncate(self._fd, 0)
                self._append({"plan": plan, "source": source})
        except BaseException:
            self.close()
            raise

    def _lock(self, output: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            hint = "wait for it, or stop it"
            raise PlanError(f"{output}: another run is writing there", hint=hint) from error

    def _read(self, output: Path) -> tuple[dict[str, Any], dict[str, FileRecord]]:
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        before = _parse(output, content)
        os.ftruncate(self._fd, content.rfind(b"\n") + 1)
        return before

    def _check(self, output: Path, run: dict[str, Any], plan: str, source: dict[str, list[Any]]) -> None:
        hint = "restore what was there, or start anew with --overwrite"
        before = run["source"]
        changed = sorted(file for file in before.keys() | source.keys() if before.get(file) != source.get(file))
        if changed:
            raise PlanError(f"{output}: the source changed since the run that --resume would go on with: "
                            f"{', '.join(changed)}", hint=hint)  # fmt: skip
        if run["plan"] != plan:
            raise PlanError(f"{output}: the options are not those of the run that --resume would go on with", hint=hint)

    def _append(self, line: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(line).encode() + b"\n")
        os.fsync(self._fd)

    def record(self, file: str, record: FileRecord) -> None:
        """Write down that `file` lies complete and safe in the journal's folder."""
        self._append({"file": file, "size": record.size, "sha256": record.sha256})
        self.finished[file] = record

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)
