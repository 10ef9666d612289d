"""Level `model`: two models on the same text, side by side, one layer of each in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.errors import VerifyError

from ..progress import Progress, Silent
from ..threads import threads_for
from .distributions import AgreementSum
from .results import LayerDrift, ModelResult
from .stream import Call, StreamedModel

BATCH_TOKENS = 8192  # tokens that pass a layer at once: bounds the memory of its intermediate results


@dataclass
class _Batch:
    tokens: torch.Tensor
    hidden: list[torch.Tensor]  # reference, candidate, …: [B, T, H] each
    calls: list[list[list[Call]]]  # [side][layer][step]


class Drift:
    """Sums up the distance of hidden states over batches.

    Attributes:
        tokens: How many were added.
    """

    def __init__(self) -> None:
        self._error = self._norm = self._cosine = 0.0
        self.tokens = 0

    def add(self, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Add the hidden states [.., H] of the two sides."""
        ours, theirs = reference.to(torch.float32), candidate.to(torch.float32)
        self._error += float((ours - theirs).square().sum(dtype=torch.float64))
        self._norm += float(ours.square().sum(dtype=torch.float64))
        self._cosine += float(torch.cosine_similarity(ours, theirs, dim=-1).sum(dtype=torch.float64))
        self.tokens += ours[..., 0].numel()

    def result(self, layer: int) -> LayerDrift:
        """The distance over all that was added, as that of layer `layer`."""
        relative = (self._error / self._norm) ** 0.5 if self._norm else float(self._error > 0)
        return LayerDrift(layer, relative, self._cosine / self.tokens)


def compare_models(
    reference: StreamedModel,
    candidate: StreamedModel,
    windows: torch.Tensor,
    decode_steps: int,
    progress: Progress | None = None,
    weights_only: StreamedModel | None = None,
) -> ModelResult:
    """Carry the hidden states of both models through their layers, and compare what they predict.

    Args:
        reference: The source.
        candidate: What is verified.
        windows: int64 [B, T] tokens.
        decode_steps: Last tokens of each window that are fed one at a time (teacher forcing).
        progress: Hears of the layers done.
        weights_only: The candidate's weights in fp32 arithmetic, to tell their share of the loss from that of rounded
            activations and kernels.

    Raises:
        VerifyError: They are not equally deep.
    """
    sides = (reference, candidate, *([weights_only] if weights_only else []))
    if reference.depth != candidate.depth:
        raise VerifyError(f"the candidate has {candidate.depth} decoder layers, the reference {reference.depth}")
    steps = [windows.shape[1] - decode_steps] + [1] * decode_steps
    with torch.inference_mode(), threads_for(max(side.largest_layer for side in sides)):
        batches = [_begin(sides, part, steps) for part in windows.split(max(1, BATCH_TOKENS // windows.shape[1]))]
        drift = _drift(sides, batches, progress or Silent())
        overall, decode, weights = AgreementSum(), AgreementSum(), AgreementSum()
        for batch in batches:
            logits = [side.head(batch.tokens, hidden) for side, hidden in zip(sides, batch.hidden, strict=True)]
            targets = torch.cat((batch.tokens[:, 1:], torch.full_like(batch.tokens[:, :1], -1)), dim=1)
            overall.add(logits[0], logits[1], targets)
            if weights_only:
                weights.add(logits[0], logits[2], targets)
            if decode_steps:
                decode.add(logits[0][:, steps[0] :], logits[1][:, steps[0] :], targets[:, steps[0] :])
    return ModelResult(
        windows=windows.shape[0],
        window=windows.shape[1],
        decode_steps=decode_steps,
        overall=overall.result(),
        decode=decode.result() if decode_steps else None,
        drift=tuple(drift),
        weights_only=weights.result() if weights_only else None,
    )


def _begin(sides: tuple[StreamedModel, ...], tokens: torch.Tensor, steps: list[int]) -> _Batch:
    begun = [side.embed(tokens, steps) for side in sides]
    return _Batch(tokens, [hidden for hidden, _ in begun], [calls for _, calls in begun])


def _drift(sides: tuple[StreamedModel, ...], batches: list[_Batch], progress: Progress) -> list[LayerDrift]:
    drift = []
    progress.start("verifying the model", sides[0].depth, unit="layers")
    try:
        for layer in range(sides[0].depth):
            drift.append(_advance(sides, layer, batches))
            progress.advance()
    finally:
        progress.finish()
    return drift


def _advance(sides: tuple[StreamedModel, ...], layer: int, batches: list[_Batch]) -> LayerDrift:
    for index, side in enumerate(sides):
        with side.layer(layer) as run:
            for batch in batches:
                batch.hidden[index] = run(batch.hidden[index], batch.calls[index][layer])
    drift = Drift()
    for batch in batches:
        drift.add(*batch.hidden[:2])
    return drift.result(layer)
