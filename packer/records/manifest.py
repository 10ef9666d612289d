"""What the manifest of a directory says about how it was made, and whether the files are still what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tilewright.kernels.errors import quoted
from tilewright.kernels.packed.manifest import MANIFEST_FILE, difference, read_manifest

from ..progress import Progress, Silent


def solver_of(root: Path) -> str | None:
    """Id of the solver that chose the numbers of a directory, through packing too; None where nobody says.

    Raises:
        CheckpointError: The manifest cannot be read.
    """
    manifest = read_manifest(root)
    solver = manifest.options.get("solver") if manifest else None
    return str(solver) if solver else None


def manifest_hash(root: Path) -> str | None:
    """SHA-256 of the manifest of a directory, and so of all its files; None if there is none."""
    try:
        return hashlib.sha256((root / MANIFEST_FILE).read_bytes()).hexdigest()
    except OSError:
        return None


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
    if manifest is None:
        return None
    stated = {n: one for n, one in manifest.files.items() if n in shards or not n.endswith(".safetensors")}
    damaged = []
    progress = progress or Silent()
    progress.start("reading files", sum(one.size for one in stated.values()))
    try:
        for name, one in stated.items():
            reason = difference(root / name, one) if _below(name) else "leads out of the directory"
            if reason:
                place = str(root / name)
                damaged.append(f"{place if place.isprintable() else quoted(place)}: {reason}")
            progress.advance(one.size)
    finally:
        progress.finish()
    return FileCheck(len(stated), tuple(damaged))


def _below(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name
