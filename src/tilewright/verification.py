"""Verification, joined with the engine that runs packed models: the packer itself imports no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tilewright

from .packer.jobs.verify import verify as verify_with
from .packer.jobs.verify_served import verify_served as verify_served_with
from .packer.progress import Progress
from .packer.verify.options import VerifyOptions
from .packer.verify.verdict import Verification


def verify(
    reference: str | Path,
    candidate: str | Path,
    options: VerifyOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Verification:
    """Compare `candidate`, quantized or packed, with `reference`.

    Args:
        reference: A directory, one .safetensors file, or a hub id.
        candidate: The same.
        options: How far to go, and what passes.
        progress: Hears how far the job is; a tqdm bar by default, `Silent()` says nothing.

    Raises:
        OptionError: The options are not allowed.
        TilewrightError: One of them cannot be read, or not be run. A result below its threshold is no error.
    """
    return verify_with(reference, candidate, options, load_model=_load_model, progress=progress)


def verify_served(
    reference: str | Path,
    url: str,
    options: VerifyOptions,
    *,
    model: str | None = None,
    choices: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare what a running server predicts with `reference`, on the windows on which files are compared too.

    Args:
        reference: A directory, or a hub id.
        url: Address of a vLLM or SGLang server.
        options: Text, windows and what passes; `level` is `model`.
        model: Which of the server's models; None if it has one only.
        choices: Choices to ask for at each token; None lets the size of the vocabulary decide.
        progress: Hears how far the job is; a tqdm bar by default, `Silent()` says nothing.

    Raises:
        OptionError: The options are not allowed.
        TilewrightError: The reference cannot be run, or the server not be asked. A bad result is no error.
    """
    return verify_served_with(
        reference, url, options, load_model=_load_model, model=model, choices=choices, progress=progress
    )


def _load_model(path: Path) -> Any:
    return tilewright.load_model(path)  # imported when a packed model is met
