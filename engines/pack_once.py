"""Packs a checkpoint the first time that an engine is to serve it, and finds the packed directory from then on.

Packing is work of the packer, which no server imports: `python -m tilewright pack-for-cpu` is started as a process.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from huggingface_hub import snapshot_download

from tilewright import __version__
from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.manifest import MANIFEST_FILE
from tilewright.kernels.packed.module_spec import QUANT_METHOD, rank_directory

Tell = Callable[[str], None]
_KEPT_LINES = 10  # of what the process says, for the message if it fails
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def local_directory(model: str, revision: str | None = None) -> Path:
    """The directory of a model that is named by its path or its id on the hub."""
    path = Path(model)
    return path if path.exists() else Path(snapshot_download(model, revision=revision))


def is_packed(directory: Path) -> bool:
    """Whether a directory's config.json says that it was packed."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return bool(config["quantization_config"]["quant_method"] == QUANT_METHOD)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def packed_once(source: Path, folder: Path | None, tp: int = 1, ep: int = 1, tell: Tell = lambda line: None) -> Path:
    """The packed directory of a checkpoint; made if it is not there.

    Its name holds a hash of the names, sizes and times of the checkpoint's files: a changed checkpoint is packed anew.
    Only one process packs, others wait for it; one that is killed is gone on with by the next.

    Args:
        source: A checkpoint, plain or quantized.
        folder: Where packed directories are kept; None means beside the checkpoint.
        tp: Ranks that every matrix is cut for.
        ep: Groups of ranks that the experts are dealt to.
        tell: Hears how far packing is.

    Raises:
        CheckpointError: There is no checkpoint, it cannot be packed, or nothing can be written there.
    """
    source = source.resolve()
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: no such directory", hint="name the folder of a checkpoint, or its id on the hub"
        )
    folder = source.parent if folder is None else folder.expanduser().resolve()
    cut = f"-tp{tp}-ep{ep}" if max(tp, ep) > 1 else ""
    target = folder / f"{source.name}-packed{cut}-{_fingerprint(source)}"
    if _is_complete(target, max(tp, ep)) and not _lock_of(target).exists():
        return target
    with _locked(target, tell) as lock:
        if not _is_complete(target, max(tp, ep)):
            tell(f"packing {source.name} into {target}; this is done once")
            _pack(source, target, tp, ep, lock, tell)
    return target


def _fingerprint(source: Path) -> str:
    """Hash of what tells one state of a checkpoint from another without reading it."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(path for path in source.iterdir() if path.is_file()):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]


def _is_complete(target: Path, ranks: int) -> bool:
    directories = [target] if ranks == 1 else [target / rank_directory(rank, ranks) for rank in range(ranks)]
    return (target / "config.json").is_file() and all((path / MANIFEST_FILE).is_file() for path in directories)


def _lock_of(target: Path) -> Path:
    """The file that whoever packs a directory holds; one that nobody holds was left by a process that was killed."""
    return target.with_name(f".{target.name}.lock")


def _is_still(path: Path, file: IO[str]) -> bool:
    """Whether a path still names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def _locked(target: Path, tell: Tell) -> Iterator[IO[str]]:
    """Hold the lock of a packed directory; the file that holds it goes when it is released."""
    path = _lock_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        while True:
            lock = path.open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(f"another process packs {target.name}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_still(path, lock):
                break
            lock.close()  # its last holder has removed it in between
    except OSError as error:
        hint = "name a folder that can be written to: --download-dir FOLDER"
        raise CheckpointError(f"{target.parent}: cannot be written to: {error.strerror}", hint=hint) from error
    try:
        yield lock
    finally:
        path.unlink(missing_ok=True)
        lock.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _pack(source: Path, target: Path, tp: int, ep: int, lock: IO[str], tell: Tell) -> None:
    command = [sys.executable, "-m", "tilewright", "pack-for-cpu", str(source), str(target), "--resume"]
    command += [f"--tp={tp}", f"--ep={ep}"]
    # The process holds the lock too: nobody else packs here before it has ended, even if this one is killed.
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[lock.fileno()],
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    assert process.stderr
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    with process:
        for line in process.stderr:
            if line.strip():
                last.append(line.strip())
                tell(line.strip())
    if process.returncode:
        reason = "\n  ".join(last) or f"it ended with {process.returncode}"
        raise CheckpointError(f"{source}: cannot be packed:\n  {reason}", hint="`pack-for-cpu --dry-run` says more")
