"""Tilewright: quantize and pack Hugging Face checkpoints offline, and run the packed layers as they lie on disk."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engines.transformers.model import load_model
    from .kernels.packed.directory import load_packed

__all__ = ["__version__", "load_model", "load_packed"]
__version__ = "0.1.0"

# Loaded when they are first asked for: the second needs transformers, and neither is needed to convert a checkpoint.
_LAZY = {"load_packed": ".kernels.packed.directory", "load_model": ".engines.transformers.model"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError("load_model needs transformers; install it with: pip install 'tilewright[hf]'") from error
