"""Fetch a checkpoint from the Hugging Face hub into the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

from tilewright.kernels.errors import CheckpointError

from .side_files import WEIGHT_SUFFIXES

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_hub_id(source: str) -> bool:
    """Whether `source` is spelled like `org/name` or `org/name@revision`."""
    return _HUB_ID.fullmatch(source) is not None


def download(source: str) -> Path:
    """The local snapshot of a hub id, downloaded or completed if need be; weights in other formats are left there.

    Raises:
        CheckpointError: The hub does not have it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download  # the client loads slowly, and most sources are local

    repo, _, revision = source.partition("@")
    unwanted = [f"*{suffix}" for suffix in sorted(WEIGHT_SUFFIXES - {".safetensors"})]
    try:
        return Path(snapshot_download(repo, revision=revision or None, ignore_patterns=unwanted))
    except Exception as error:  # which errors there are depends on the client's version and on its HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{source}: no such file or directory here, and the hub does not give it: {reason}",
            hint="check the spelling, the network, and `hf auth login` for gated models",
        ) from error
