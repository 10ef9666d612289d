"""Who may read an output: nobody who may not read its source."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.files import Checkpoint

FILE, FOLDER = 0o644, 0o755  # at most, and as far as the umask lets them through


@dataclass(frozen=True)
class Permissions:
    """Modes of what is made.

    Attributes:
        file: Of files made of the weights.
        folder: Of directories.
    """

    file: int
    folder: int

    @staticmethod
    def like(checkpoint: Checkpoint) -> Permissions:
        """Those that the directory and the least readable shard of a source allow."""
        file, folder = FILE, FOLDER & (0o700 | stat.S_IMODE(checkpoint.root.stat().st_mode))
        for name, header in checkpoint.headers.items():
            if name not in checkpoint.gone:
                file &= 0o600 | stat.S_IMODE(header.path.stat().st_mode)
        return Permissions(file, folder)

    def of(self, source: Path) -> int:
        """That of the copy of a side file."""
        return FILE & (0o600 | stat.S_IMODE(source.stat().st_mode))
