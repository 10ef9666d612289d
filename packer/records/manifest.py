"""What the manifest of a directory says about how it was made, and whether the files are still what it says."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.manifest import MANIFEST_FILE, difference

from ..progress import Progress, Silent


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of a directory, empty for one that Tilewright did not write.

    Raises:
        CheckpointError: It is there and cannot be read.
    """
    path = root / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        hint = "it was written by Tilewright; restore it, or remove it if the directory is of another tool"
        raise CheckpointError(f"{path}: cannot be read: {error}", hint=hint) from error
    return manifest if isinstance(manifest, dict) and "tilewright" in manifest else {}


def solver_of(root: Path) -> str | None:
    """Id of the solver that chose the numbers of a directory, through packing too; None where nobody says."""
    solver = read_manifest(root).get("options", {}).get("solver")
    return str(solver) if solver else None


@dataclass(frozen=True)
class FileCheck:
    """Files compared with their manifest.

    Attributes:
        checked: How many.
        damaged: One line for each that differs, with its path.
    """

    checked: int
    damaged: tuple[str, ...]


def check_files(root: Path, shards: Collection[str], progress: Progress | None = None) -> FileCheck | None:
    """Read every file that the manifest of a directory names, and compare its size and SHA-256.

    Args:
        root: The directory.
        shards: Names of the weight files that count; others are left alone.
        progress: Hears of the bytes read.

    Returns:
        What was found, or None if there is no manifest.

    Raises:
        CheckpointError: The manifest cannot be read.
    """
    manifest = read_manifest(root)
    if not manifest:
        return None
    try:
        stated = {str(name): (int(one["size"]), str(one["sha256"])) for name, one in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{root / MANIFEST_FILE}: does not say size and SHA-256 of each file: {error!r}",
            hint="restore it from where the directory came, or leave the checksums out",
        ) from error
    names = [name for name in stated if name in shards or not name.endswith(".safetensors")]
    damaged = []
    progress = progress or Silent()
    progress.start("reading files", sum(stated[name][0] for name in names))
    try:
        for name in names:
            if reason := difference(root / name, *stated[name]):
                damaged.append(f"{root / name}: {reason}")
            progress.advance(stated[name][0])
    finally:
        progress.finish()
    return FileCheck(len(names), tuple(damaged))
