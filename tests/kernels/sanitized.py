"""A pytest plugin that loads another build of the native library: the one that SANITIZED_LIBRARY names."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_load_library = torch.ops.load_library


def _load_sanitized(path: str) -> None:
    _load_library(os.environ["SANITIZED_LIBRARY"] if Path(path).name == "_C.so" else path)


torch.ops.load_library = _load_sanitized
