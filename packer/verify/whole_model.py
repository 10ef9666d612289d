"""Level `model` for two directories: the models that they hold, streamed side by side over a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import AutoConfig

from tilewright.engines.transformers.model import load_model
from tilewright.kernels.errors import VerifyError

from ..checkpoint.contents import Contents
from ..checkpoint.files import Checkpoint
from ..checkpoint.packed import packed_modules
from .dequantized import stream_dequantized
from .job import Request, Side
from .model import compare_models
from .results import ModelResult
from .stream import StreamedModel
from .text import evenly_spaced_windows, read_tokens


def compare_directories(sides: Sequence[Side], request: Request, progress: Callable[[int, int], None]) -> ModelResult:
    """Run the models of two directories, reference first, on windows out of the text of the request."""
    if request.text is None:
        raise VerifyError("level `model` compares models on a text, and none was given", hint="add --text FILE")
    tokens = evenly_spaced_windows(read_tokens(sides[0][0].root, request.text), request.windows, request.window)
    reference, candidate = (stream(checkpoint, contents) for checkpoint, contents in sides)
    return compare_models(reference, candidate, tokens, request.decode_steps, progress)


def stream(checkpoint: Checkpoint, contents: Contents) -> StreamedModel:
    """Packed directories run by the bundled kernels as they lie in the mapped files, all others in fp32."""
    if not packed_modules(checkpoint):
        try:
            config = AutoConfig.from_pretrained(checkpoint.root, local_files_only=True)
        except (OSError, ValueError) as error:
            hint = "levels weights and layers need no architecture"
            raise VerifyError(f"{checkpoint.root}: transformers cannot build this model: {error}", hint=hint) from error
        return stream_dequantized(config, contents)
    model: Any = load_model(checkpoint.root)

    def fill(module: nn.Module, path: str) -> None:
        """Nothing to do: every tensor is a view of a mapped file."""

    def empty(module: nn.Module, path: str) -> None:
        model.packed.forget(f"{path}.")

    return StreamedModel(model, fill, empty)
