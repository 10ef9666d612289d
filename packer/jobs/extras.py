"""Modules of ours that need an extra are imported when a job first asks for them."""

from __future__ import annotations

import importlib
from types import ModuleType

from tilewright.kernels.errors import TilewrightError


def needing_transformers(module: str, option: str) -> ModuleType:
    """Import `tilewright.packer.<module>`, which needs transformers.

    Raises:
        TilewrightError: transformers is not installed.
    """
    try:
        return importlib.import_module(f"tilewright.packer.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tilewright"):
            raise
        raise TilewrightError(f"{option} needs `{error.name}`", hint="pip install 'tilewright[hf]'") from error
