"""Tell what a directory is, from its headers."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import CheckpointError

from ..checkpoint.files import Checkpoint, open_checkpoint
from ..inspect import Inspection
from ..inspect import inspect as inspect_checkpoint
from ..quant_config.exclusions import View, engine_views
from ..records.manifest import check_files

log = logging.getLogger("tilewright")


def inspect(path: str | Path, *, checksums: bool = False) -> Inspection:
    """Describe a directory, plain, quantized or packed, a .safetensors file or a hub id.

    Args:
        path: What to describe.
        checksums: Also read all files and compare them with manifest.json.

    Raises:
        CheckpointError: It cannot be read, or a file is not what the manifest says.
    """
    return inspect_checkpoint(_open(path, checksums), str(path))


def engine_exclusions(path: str | Path, *, checksums: bool = False) -> tuple[View, ...]:
    """What each engine makes of the list of unquantized modules in the config of a directory; see `inspect`."""
    checkpoint = _open(path, checksums)
    return tuple(engine_views({name: checkpoint.spec(name) for name in checkpoint.files}, checkpoint.config))


def _open(path: str | Path, checksums: bool) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    if checksums:
        compare_files(checkpoint)
    return checkpoint


def compare_files(checkpoint: Checkpoint) -> None:
    """Compare the size and SHA-256 of every file with the manifest.

    Raises:
        CheckpointError: A file differs, or there is no manifest.
    """
    found = check_files(checkpoint.root, checkpoint.headers)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.root}: --checksums: there is no manifest.json of Tilewright to compare with",
            hint="leave --checksums out; only what Tilewright wrote has one",
        )
    if found.damaged:
        raise CheckpointError(
            f"{checkpoint.root}: {len(found.damaged)} of {found.checked} files are not what was written\n"
            + "\n".join(f"  {line}" for line in found.damaged),
            hint="fetch or convert them again",
        )
    log.info("%d files are what manifest.json says", found.checked)


def views_to_json(views: tuple[View, ...]) -> list[dict[str, Any]]:
    """JSON values."""
    return [asdict(view) for view in views]
