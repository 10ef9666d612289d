"""Write one output file whose layout is known: pieces arrive in any order, the hash follows what is complete."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from tilewright.kernels.errors import CheckpointError

from ..plan import CHUNK


class FileWriter:
    """A file of known size, written under a temporary name by several threads.

    sha256 must see the bytes in order. Whichever thread makes the completed beginning of the file longer also hashes
    it, unless another one is at it already, which then goes on; so no thread waits and no byte is hashed late.

    Args:
        path: Where it is written.
        size: Its size in bytes.
        advance: Hears how many bytes were written.
        mode: Permissions, as far as the umask lets them through.
    """

    def __init__(
        self, path: Path, size: int, advance: Callable[[int], None] = lambda count: None, mode: int = 0o644
    ) -> None:
        self.path = path
        self.size = size
        self._advance = advance
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        self._lock = threading.Lock()  # of the two fields below
        self._end = 0  # everything before it is written
        self._islands: dict[int, int] = {}  # start -> end of what is written beyond
        self._hashing = threading.Lock()  # of the two fields below
        self._hashed = 0
        self._sha256 = hashlib.sha256()
        self._unsynced = 0  # bytes since the last `sync`: a hint, so it needs no lock

    @property
    def complete(self) -> bool:
        """Whether every byte is written and hashed."""
        return self._hashed == self.size

    @property
    def unsynced(self) -> int:
        """About how many bytes were written since the last `sync`."""
        return self._unsynced

    def write(self, offset: int, data: torch.Tensor | bytes) -> None:
        """Write `data`, contiguous, at byte `offset` of the file."""
        view = memoryview(data) if isinstance(data, bytes) else data.reshape(-1).view(torch.uint8).numpy().data
        assert offset + len(view) <= self.size, f"{self.path}: {offset} + {len(view)} > {self.size}"
        for start in range(0, len(view), CHUNK):
            self._write_chunk(offset + start, view[start : start + CHUNK])

    def copy(self, offset: int, source: int, start: int, length: int, path: Path) -> None:
        """Copy `length` bytes from byte `start` of the open file `source` to byte `offset`.

        Raises:
            CheckpointError: The source, `path`, is shorter than it was.
        """
        assert offset + length <= self.size
        buffer = memoryview(bytearray(min(CHUNK, length)))
        done = 0
        while done < length:
            try:
                count = os.preadv(source, [buffer[: length - done]], start + done)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{path}: became shorter while it was read", hint="restore it; use --resume")
            self._write_chunk(offset + done, buffer[:count])
            done += count

    def _write_chunk(self, offset: int, view: memoryview) -> None:
        start = offset
        while view:
            written = os.pwrite(self._fd, view, offset)
            view = view[written:]
            offset += written
        self._unsynced += offset - start
        self._advance(offset - start)
        with self._lock:
            self._islands[start] = offset
            while (end := self._islands.pop(self._end, None)) is not None:
                self._end = end
        self._follow()

    def _follow(self) -> None:
        """Hash what is complete and not yet hashed."""
        while self._hashed < self._end and self._hashing.acquire(blocking=False):
            try:
                buffer = memoryview(bytearray(min(CHUNK, self._end - self._hashed)))
                while self._hashed < self._end:
                    count = os.preadv(self._fd, [buffer[: self._end - self._hashed]], self._hashed)
                    if count == 0:
                        raise OSError(errno.EIO, "became shorter while it was written", str(self.path))
                    self._sha256.update(buffer[:count])
                    self._hashed += count
            finally:
                self._hashing.release()

    def sync(self) -> None:
        """Have the disk take what was written so far, so that the rest is little at the end."""
        self._unsynced = 0
        os.fdatasync(self._fd)

    def finish(self) -> str:
        """Make the file safe on disk and close it.

        Returns:
            sha256 of its content, in hexadecimal.
        """
        assert self.complete, f"{self.path}: {self._hashed} of {self.size} bytes"
        os.fsync(self._fd)
        self.close()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Close the file without finishing it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
