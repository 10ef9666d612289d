"""Verify that a running server predicts what its checkpoint does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import OptionError

from ..checkpoint.files import open_checkpoint
from ..checkpoint.reading import read_contents
from ..progress import Progress, progress_on
from ..verify.options import VerifyOptions
from ..verify.servers import connect
from ..verify.text import evenly_spaced_windows, read_tokens, tokenize
from ..verify.verdict import Verification
from .extras import needing_transformers


def verify_served(
    reference: str | Path,
    url: str,
    options: VerifyOptions,
    *,
    load_model: Callable[[Path], Any],
    model: str | None = None,
    choices: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """See `tilewright.verify_served`, which hands in `load_model`: what loads a packed directory as a model."""
    if options.text is None:
        raise OptionError("--served compares predictions on a text: add --text FILE")
    progress = progress or progress_on()
    server = connect(url, model)
    whole_model = needing_transformers("verify.whole_model", "--served")
    served = needing_transformers("verify.served", "--served")
    checkpoint = open_checkpoint(reference)
    tokens = read_tokens(checkpoint.root, options.text)
    sample = options.text.read_text(encoding="utf-8")[: served.SAMPLE]
    served.check_tokenizer(server, sample, tokenize(checkpoint.root, sample))
    windows = evenly_spaced_windows(tokens, options.windows, options.window)
    stream = whole_model.stream(checkpoint, read_contents(checkpoint), load_model)
    result, notes = served.compare_served(stream, server, windows, choices, progress)
    return Verification(
        reference=str(reference),
        candidate=f"{server.name} at {url}",
        level="model",
        thresholds=options.thresholds,
        tensors=[],
        model=result,
        notes=[*checkpoint.notes, *notes],
    )
