"""The last step of a run: final names, side files, config, index, ledger, and the manifest that says it is complete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tilewright
from tilewright.kernels.packed.manifest import MANIFEST_FILE
from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES

from ..checkpoint.files import Checkpoint
from ..checkpoint.shard_index import INDEX_NAME
from ..plan import Plan
from ..records.journal import PARTIAL, FileRecord, Journal
from .gate import Job
from .shards import encode_index
from .writer import FileWriter, opened, publish, sync_directory, write_file

LEDGER = "ledger.json"


def clear(output: Path) -> None:
    """Remove what an earlier run wrote; its manifest first, so that the rest never looks complete."""
    (output / MANIFEST_FILE).unlink(missing_ok=True)
    sync_directory(output)
    for path in sorted(output.iterdir(), key=lambda path: path.name == PARTIAL):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def complete(job: Job, journal: Journal) -> None:
    """Make the output what the plan says, from shards that lie finished in the journal's folder."""
    output, plan, checkpoint = job.output, job.plan, job.checkpoint
    for shard in job.shards:
        finished = journal.folder / shard.file
        if finished.exists():  # else an earlier run was stopped after it got its name
            finished.replace(output / shard.file)
    sync_directory(output)
    records = {shard.file: journal.finished[shard.file] for shard in job.shards}
    temporary = journal.folder / "unfinished"
    for path in checkpoint.side_files:
        if str(path) not in plan.extra_files and str(path) not in plan.stale_files:
            records[str(path)] = _copy(checkpoint.root / path, output / path, temporary)
    small = dict(plan.extra_files)
    small["config.json"] = _pretty(plan.config)
    if len(job.shards) > 1:
        small[INDEX_NAME] = encode_index(plan, job.shards)
    small[LEDGER] = _pretty(_ledger(plan, checkpoint))
    for name, content in small.items():
        records[name] = FileRecord(len(content), write_file(output / name, content, temporary))
    write_file(output / MANIFEST_FILE, _pretty(_manifest(job, records)), temporary)
    shutil.rmtree(journal.folder)
    sync_directory(output)


def _copy(source: Path, path: Path, temporary: Path) -> FileRecord:
    size = source.stat().st_size
    writer = FileWriter(temporary, size)
    try:
        with opened(source) as fd:
            writer.copy(0, fd, 0, size, source)
        digest = writer.finish()
    finally:
        writer.close()
    publish(temporary, path)
    return FileRecord(size, digest)


def _ledger(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """One fate for each source tensor, sorted by name."""
    tensors = {}
    for name, fate in sorted(plan.fates.items()):
        spec = checkpoint.spec(name)
        tensors[name] = {
            "fate": fate.kind,
            "reason": fate.reason,
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "outputs": list(fate.outputs),
        }
    return {"notes": [*checkpoint.notes, *plan.notes], "tensors": tensors}


def _manifest(job: Job, records: dict[str, FileRecord]) -> dict[str, Any]:
    layouts = {(module["layout"], module["version"]) for module in job.plan.modules.values() if "layout" in module}
    return {
        "tilewright": tilewright.__version__,
        "plan": job.plan_hash,
        "options": job.plan.options,
        "layouts": dict(sorted(layouts)),
        "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(records.items())},
    }


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
