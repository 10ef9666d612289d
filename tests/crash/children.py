"""Run commands in children that are forked from a process which has imported everything and computed nothing."""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import signal
from collections.abc import Callable
from pathlib import Path

import tilewright.cli
import tilewright.packer
from tilewright.cli.main import load, run

LIMIT = 120.0  # seconds that a child may take


def import_everything() -> None:
    """So that no child has to, and each does nothing but its work."""
    for package in (tilewright.packer, tilewright.cli):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    importlib.import_module("tokenizers")


def hashes(root: Path) -> dict[str, str]:
    """Every file below `root` with its SHA-256."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fork(action: Callable[[], object], log: Path, limit: float = LIMIT) -> int:
    """Start `action` in a child that writes to the file `log` and dies after `limit` seconds, 0 meaning never."""
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(int(limit))
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        action()
        os._exit(0)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(99)


def wait(child: int) -> int:
    """How a child ended: its exit code, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(name: str, *arguments: str | Path) -> Callable[[], object]:
    """What runs a command of ours."""
    return lambda: run(load(name), name, [str(argument) for argument in arguments])
