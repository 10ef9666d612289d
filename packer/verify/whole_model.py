"""Level `model` for two directories: the models that they hold, streamed side by side over a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tilewright.kernels.errors import VerifyError

from ..checkpoint.contents import Contents
from ..checkpoint.files import Checkpoint
from ..checkpoint.packed import packed_modules
from ..progress import Progress
from .dequantized import model_config, stream_dequantized
from .model import compare_models
from .options import VerifyOptions
from .results import ModelResult
from .stream import StreamedModel
from .text import evenly_spaced_windows, read_tokens

Side = tuple[Checkpoint, Contents]
LoadModel = Callable[[Path], Any]
"""Loads a packed directory as a model that its kernels run; `tilewright.load_model`."""


def compare_directories(
    sides: Sequence[Side], options: VerifyOptions, load_model: LoadModel, progress: Progress | None = None
) -> ModelResult:
    """Run the models of two directories, reference first, on windows out of the text of the options."""
    if options.text is None:
        raise VerifyError("level `model` compares models on a text, and none was given", hint="add --text FILE")
    tokens = evenly_spaced_windows(read_tokens(sides[0][0].root, options.text), options.windows, options.window)
    reference, candidate = (stream(checkpoint, contents, load_model) for checkpoint, contents in sides)
    weights_only = None
    if options.split_loss and packed_modules(sides[1][0]):
        weights_only = stream_dequantized(model_config(sides[0][0].root), sides[1][1])
    return compare_models(reference, candidate, tokens, options.decode_steps, progress, weights_only)


def stream(checkpoint: Checkpoint, contents: Contents, load_model: LoadModel) -> StreamedModel:
    """Packed directories run by the bundled kernels as they lie in the mapped files, all others in fp32."""
    if not packed_modules(checkpoint):
        return stream_dequantized(model_config(checkpoint.root), contents)
    model = load_model(checkpoint.root)

    def fill(module: nn.Module, path: str) -> None:
        """Nothing to do: every tensor is a view of a mapped file."""

    def empty(module: nn.Module, path: str) -> None:
        model.packed.forget(f"{path}.")

    return StreamedModel(model, fill, empty)
