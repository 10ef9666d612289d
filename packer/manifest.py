"""What the manifest of a directory says about how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import CheckpointError

NAME = "manifest.json"


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of a directory, empty for one that Tilewright did not write.

    Raises:
        CheckpointError: It is there and cannot be read.
    """
    path = root / NAME
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
