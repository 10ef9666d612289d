"""Level `model` for two directories: the models that they hold, streamed side by side over a text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tilewright.kernels.errors import TilewrightError, VerifyError
from tilewright.kernels.huggingface.classes import first_words

from ..checkpoint.contents import Contents
from ..checkpoint.files import Checkpoint
from ..checkpoint.packed import packed_modules
from ..progress import Progress
from ..threads import threads_for
from .dequantized import dequantized_model, model_config
from .model import compare_models
from .options import VerifyOptions
from .results import ModelResult
from .stream import NotStreamableError, StreamedModel, Visit
from .text import evenly_spaced_windows, read_tokens
from .whole import WholeModel, compare_whole
from .worst_linears import WorstLinears

log = logging.getLogger("tilewright")
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
    models = [partial(_model, checkpoint, contents, load_model) for checkpoint, contents in sides]
    if options.split_loss and packed_modules(sides[1][0]):
        models.append(partial(dequantized_model, model_config(sides[0][0].root), sides[1][1]))
    try:
        reference, candidate, *others = [StreamedModel(*model()) for model in models]
        weights_only = others[0] if others else None
        result = compare_models(reference, candidate, tokens, options.decode_steps, progress, weights_only)
    except NotStreamableError as error:
        log.info("%s: %s; its layers run together", sides[0][0].root, error.message)
    except TilewrightError:
        raise
    except Exception as error:  # a class of transformers whose layers want more than is known of them
        log.info("%s: its layers run together: %s", sides[0][0].root, first_words(error))
    else:
        if weights_only is None:
            return result
        by_group = getattr(candidate.model.packed, "activation_scales", "") == "group"
        worst = WorstLinears(reference, sides[1][1], packed_modules(sides[1][0]), by_group)
        with threads_for(reference.largest_layer):
            return replace(result, worst=worst.find(tokens))
    return compare_whole([WholeModel(*model()) for model in models], tokens, options.decode_steps, progress)


def stream(checkpoint: Checkpoint, contents: Contents, load_model: LoadModel) -> StreamedModel:
    """The model of one directory, a layer at a time.

    Raises:
        NotStreamableError: Its layers need each other.
    """
    return StreamedModel(*_model(checkpoint, contents, load_model))


def _model(checkpoint: Checkpoint, contents: Contents, load_model: LoadModel) -> tuple[PreTrainedModel, Visit, Visit]:
    """Packed directories run by the bundled kernels as they lie in the mapped files, all others in fp32."""
    if not packed_modules(checkpoint):
        return dequantized_model(model_config(checkpoint.root), contents)
    model = load_model(checkpoint.root)

    def fill(module: nn.Module, path: str) -> None:
        """Nothing to do: every tensor is a view of a mapped file."""

    def empty(module: nn.Module, path: str) -> None:
        model.packed.forget(f"{path}.")

    return model, fill, empty
