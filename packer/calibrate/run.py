"""The calibration pass: a text runs through the model from disk, one decoder layer in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tilewright.kernels.errors import PlanError

from ..checkpoint.files import Checkpoint
from ..checkpoint.reading import read_contents
from ..progress import Progress, Silent
from ..threads import threads_for
from ..verify.dequantized import model_config, stream_dequantized
from ..verify.stream import Call, StreamedModel
from ..verify.text import evenly_spaced_windows, read_tokens
from .method import BATCH_TOKENS, CalibrationTargets, Method
from .observe import observe
from .solve import LayerSolver, rarely_hit
from .store import Solution, Store


def calibrate_checkpoint(
    checkpoint: Checkpoint,
    text: Path,
    method: Method,
    wanted: CalibrationTargets,
    store: Store,
    key: str,
    progress: Progress | None = None,
) -> list[str]:
    """Calibrate a checkpoint on a text file, or go on where an interrupted run stopped.

    Args:
        checkpoint: The source.
        text: UTF-8 text; tokenized with the checkpoint's own tokenizer.
        method: What to do.
        wanted: What the plan needs.
        store: Where solutions go.
        key: Hash of the plan: what an earlier run left is used if its key was the same.
        progress: Hears of the layers done.

    Returns:
        Notes for the user.

    Raises:
        TilewrightError: The model or the text cannot be read, or nothing of what is wanted was seen.
    """
    store.begin(key)
    if (notes := store.finished()) is not None:
        return notes  # and the source may be gone, with --consume
    model = stream_dequantized(model_config(checkpoint.root), read_contents(checkpoint))
    windows = evenly_spaced_windows(read_tokens(checkpoint.root, text), method.windows, method.window)
    with threads_for(model.largest_layer):
        notes = calibrate(model, windows, method, wanted, store, progress)
    store.finish(notes)
    return notes


@torch.inference_mode()
def calibrate(
    model: StreamedModel,
    windows: torch.Tensor,
    method: Method,
    wanted: CalibrationTargets,
    store: Store,
    progress: Progress | None = None,
) -> list[str]:
    """Run `windows` through the model, and store what is found for each layer; layers that have a file are not solved.

    Every layer is fed what the source's layers before it give. (Feeding what solved layers give brought the KL
    divergence of a 135M model at int4 down by another 4% for twice the time; see docs/accuracy.md.)

    Args:
        model: The source, streamed in fp32.
        windows: int64 [B, T] tokens.
        method: What to do.
        wanted: What the plan needs.
        store: Where solutions go.
        progress: Hears of the layers done.

    Returns:
        Notes for the user.
    """
    batches = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
    begun = [model.embed(batch, [windows.shape[1]]) for batch in batches]
    hidden = [states for states, _ in begun]
    tokens: dict[str, int] = {}
    needed = wanted.needed(method)
    seen: set[str] = set()
    progress = progress or Silent()
    progress.start("calibrating", model.depth, unit="layers")
    try:
        for index in range(model.depth):
            calls = [calls[index] for _, calls in begun]
            solution = _layer(model, index, hidden, calls, LayerSolver(method, wanted, model.module(index)[0]), store)
            tokens |= solution.tokens
            seen |= solution.weights.keys() | solution.inputs.keys()
            progress.advance()
    finally:
        progress.finish()
    each_expert = method.feeds_back or wanted.inputs
    return [*_unseen(needed, seen), *(rarely_hit(tokens) if each_expert else ())]


def _unseen(needed: set[str], seen: set[str]) -> list[str]:
    """A note on weights that the run did not meet, such as those of MTP layers, which transformers does not build."""
    unseen = sorted(needed - seen)
    if not unseen:
        return []
    listed = ", ".join(unseen[:8]) + (", …" if len(unseen) > 8 else "")
    if len(unseen) == len(needed):
        raise PlanError(f"calibration met none of the weights that it was for: {listed}", hint="leave --calibrate out")
    return [f"calibration did not meet {len(unseen)} weights, which are solved without it: {listed}"]


def _layer(
    model: StreamedModel,
    index: int,
    hidden: list[torch.Tensor],
    calls: Sequence[Sequence[Call]],
    solver: LayerSolver,
    store: Store,
) -> Solution:
    """Solve one layer, and replace the hidden states before it by those after it, batch by batch."""
    path, layer = model.module(index)
    file = store.file(path)
    with model.layer(index) as run:
        with observe(layer, path, solver.with_hessian, solver.with_sample) as observed:
            for number, call in enumerate(calls):
                hidden[number] = run(hidden[number], call)
        if file.exists():
            return Solution.load(file)
        solution = solver.solve(dict(layer.named_modules(prefix=path)), observed)
    solution.save(file)
    return solution
