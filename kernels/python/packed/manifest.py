"""The manifest of a directory that Tilewright wrote: its name, and whether a file is still what it says."""

from __future__ import annotations

import hashlib
from pathlib import Path

MANIFEST_FILE = "manifest.json"


def difference(path: Path, size: object, digest: object, *, checksum: bool = True) -> str | None:
    """How a file differs from what the manifest says of it, or None if it does not.

    Args:
        path: The file.
        size: Its stated size in bytes.
        digest: Its stated SHA-256 in hexadecimal.
        checksum: Read the file and compare its SHA-256 too.
    """
    try:
        if (found := path.stat().st_size) != size:
            return f"has {found} bytes, {MANIFEST_FILE} says {size}"
        if not checksum:
            return None
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if actual == digest else f"has SHA-256 {actual}, {MANIFEST_FILE} says {digest}"
