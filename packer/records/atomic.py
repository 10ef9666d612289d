"""Put a small file on disk whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def atomic_write(path: Path, content: bytes, temporary: Path, mode: int = 0o644) -> str:
    """Put `content` under the name `path`: written under another name, made safe on disk, and renamed.

    Args:
        path: The file; its folder is made if need be.
        content: All of it.
        temporary: A name on the same file system that nobody else uses.
        mode: Permissions, as far as the umask lets them through.

    Returns:
        sha256 of the content, in hexadecimal.
    """
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    publish(temporary, path)
    return hashlib.sha256(content).hexdigest()


def publish(temporary: Path, path: Path, mode: int = 0o755) -> None:
    """Give a finished file its final name; a folder that is missing gets the permissions `mode`."""
    path.parent.mkdir(mode, parents=True, exist_ok=True)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory safe on disk: new, renamed and removed ones."""
    with opened(path) as fd:
        os.fsync(fd)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The file descriptor of `path`, open for reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
