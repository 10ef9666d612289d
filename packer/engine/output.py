"""The last step of a run: final names, side files, config, index, ledger, and the manifest that says it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tilewright
from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.manifest import MANIFEST_FILE, FileRecord, Manifest
from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES

from ..checkpoint.files import Checkpoint
from ..checkpoint.shard_index import INDEX_NAME
from ..plan import Plan
from ..records.atomic import atomic_write, opened, publish, sync_directory
from ..records.journal import JOURNAL, PARTIAL, Journal
from ..records.ledger import LEDGER_FILE, Ledger, LedgerEntry
from .identity import check_unchanged
from .job import Destination, Job
from .lock import empty_folder
from .permissions import Permissions
from .preflight import CLEARING
from .shards import encode_index
from .writer import FileWriter

UNFINISHED = "unfinished"  # in the folder for unfinished work: a small file that has not got its name yet


def clear(job: Job) -> None:
    """Remove what an earlier run wrote. The caller holds the lock, which stays.

    A mark says from the first step to the last that a later run has to finish this before it begins; the journal goes
    first and the manifests next, so that the rest never looks complete, or like something to go on with.
    """
    folder = job.root / PARTIAL
    (folder / CLEARING).touch(0o600)
    (folder / JOURNAL).unlink(missing_ok=True)
    sync_directory(folder)
    for one in job.destinations:
        if one.directory.exists():
            (one.directory / MANIFEST_FILE).unlink(missing_ok=True)
            sync_directory(one.directory)
            _remove(path for path in one.directory.iterdir() if path != folder)
            if one.name:
                one.directory.rmdir()
    empty_folder(folder, but=CLEARING)
    sync_directory(job.root)
    (folder / CLEARING).unlink()
    sync_directory(folder)


def _remove(paths: Any) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def complete(job: Job, journal: Journal, notes: Sequence[str], permissions: Permissions) -> None:
    """Make the output what the plans say, from shards that lie finished in the journal's folder.

    Raises:
        CheckpointError: The source changed since it was opened; there is no manifest yet.
    """
    todo = [one for one in job.destinations if not one.finished]
    manifests = [_fill(one, job.checkpoint, journal, notes, permissions) for one in todo]
    check_unchanged(job.checkpoint, headers=True, but=journal.state.consumed)
    for one, manifest in zip(todo, manifests, strict=True):
        _check_sizes(one, manifest)
        path = one.directory / MANIFEST_FILE
        atomic_write(path, manifest.to_json(), journal.folder / UNFINISHED, permissions.file)


def _fill(
    one: Destination, checkpoint: Checkpoint, journal: Journal, notes: Sequence[str], permissions: Permissions
) -> Manifest:
    """Put everything but the manifest into one output directory."""
    output, plan, temporary = one.directory, one.plan, journal.folder / UNFINISHED
    output.mkdir(permissions.folder, exist_ok=True)
    for shard in one.shards:
        finished = journal.folder / one.path(shard.file)
        if finished.exists():  # else an earlier run was stopped after it got its name
            finished.replace(output / shard.file)
    sync_directory(output)
    records = {shard.file: journal.state.finished[one.path(shard.file)] for shard in one.shards}
    for path in checkpoint.side_files:
        if str(path) not in plan.extra_files and str(path) not in plan.stale_files:
            records[str(path)] = _copy(checkpoint.root / path, output / path, temporary, permissions)
    small = dict(plan.extra_files)
    small["config.json"] = (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()
    if len(one.shards) > 1:
        small[INDEX_NAME] = encode_index(plan, one.shards)
    small[LEDGER_FILE] = _ledger(plan, checkpoint, notes).to_json()
    for name, content in small.items():
        digest = atomic_write(output / name, content, temporary, permissions.file)
        records[name] = FileRecord(len(content), digest)
    layouts = {module["layout"]: module["version"] for module in plan.modules.values() if "layout" in module}
    return Manifest(tilewright.__version__, one.plan_hash, plan.options, layouts, records)


def _check_sizes(one: Destination, manifest: Manifest) -> None:
    """A manifest states only what is there."""
    for name, record in manifest.files.items():
        path = one.directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != record.size:
            what = "is gone" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"{path}: was written with {record.size} bytes and {what}; something else writes to the output",
                hint="stop it, then start anew with --overwrite",
            )


def _copy(source: Path, path: Path, temporary: Path, permissions: Permissions) -> FileRecord:
    size = source.stat().st_size
    writer = FileWriter(temporary, size, mode=permissions.of(source))
    try:
        with opened(source) as fd:
            writer.copy(0, fd, 0, size, source)
        digest = writer.finish()
    finally:
        writer.close()
    publish(temporary, path, permissions.folder)
    return FileRecord(size, digest)


def _ledger(plan: Plan, checkpoint: Checkpoint, notes: Sequence[str]) -> Ledger:
    """One fate for each source tensor."""
    specs = {name: checkpoint.spec(name) for name in plan.fates}
    return Ledger(
        (*checkpoint.notes, *plan.notes, *notes),
        {
            name: LedgerEntry(
                fate.kind, fate.reason, DTYPE_NAMES[specs[name].dtype], specs[name].shape, tuple(fate.outputs)
            )
            for name, fate in plan.fates.items()
        },
    )
