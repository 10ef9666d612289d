"""The build backend: scikit-build-core's, and a torch to compile against where the environment has none.

torch is no entry of `build-system.requires`: pip would then download a second one into each isolated build, although
the environment that is installed into has one with the same headers. CMake finds that one under pip's isolation, too,
as `sysconfig` still names the environment; so only where there is none, as in a fresh environment, torch is asked for.
Any torch from 2.10 on will do, since what is compiled against one runs on all of them.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as backend
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
TORCH = "torch>=2.10"
STABLE_HEADER = Path("include", "torch", "csrc", "stable", "library.h")  # as in CMakeLists.txt


def torch_at_hand() -> bool:
    """Whether this interpreter, or the environment that it builds for, has a torch whose headers will do."""
    places = [Path(sysconfig.get_path(name), "torch") for name in ("purelib", "platlib")]
    if (spec := importlib.util.find_spec("torch")) and spec.origin:
        places.append(Path(spec.origin).parent)
    return any((place / STABLE_HEADER).exists() for place in places)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What a build needs beside `build-system.requires`."""
    return [*backend.get_requires_for_build_wheel(config_settings), *([] if torch_at_hand() else [TORCH])]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """The same for an editable install."""
    return [*backend.get_requires_for_build_editable(config_settings), *([] if torch_at_hand() else [TORCH])]
