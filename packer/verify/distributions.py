"""What two models predict for the same tokens: perplexity, divergence and agreement, summed up batch by batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Agreement:
    """Two models on the same tokens.

    Attributes:
        positions: Predictions compared.
        reference_perplexity: exp of the mean negative log-likelihood of the next token, in nats, by the reference.
        candidate_perplexity: The same by the candidate.
        kl: Mean Kullback-Leibler divergence KL(reference || candidate) over the positions, in nats.
        kl_largest: Largest divergence of one position.
        top1: Share of positions where both rank the same token first.
    """

    positions: int
    reference_perplexity: float
    candidate_perplexity: float
    kl: float
    kl_largest: float
    top1: float


class AgreementSum:
    """Collects batches of logits into an `Agreement`; sums are kept in float64."""

    def __init__(self) -> None:
        self._positions = self._targets = self._same = 0
        self._losses = [0.0, 0.0]
        self._kl = self._kl_largest = 0.0

    def add(self, reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> None:
        """Add logits of both sides.

        Args:
            reference: [B, T, V] logits.
            candidate: [B, T, V] logits.
            targets: int64 [B, T], the token that really follows each position; -1 where the text ends.
        """
        p, q = (F.log_softmax(logits.float(), dim=-1) for logits in (reference, candidate))
        kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
        self._kl += float(kl.sum())
        self._kl_largest = max(self._kl_largest, float(kl.max()))
        self._same += int((reference.argmax(-1) == candidate.argmax(-1)).sum())
        self._positions += kl.numel()
        known = targets >= 0
        self._targets += int(known.sum())
        picked = targets.clamp_min(0)[..., None]
        for side, logs in enumerate((p, q)):
            self._losses[side] -= float(logs.gather(-1, picked)[..., 0][known].sum(dtype=torch.float64))

    def result(self) -> Agreement:
        """The means over everything added."""
        reference, candidate = (math.exp(min(loss / max(self._targets, 1), 700.0)) for loss in self._losses)
        positions = max(self._positions, 1)
        return Agreement(
            positions=self._positions,
            reference_perplexity=reference,
            candidate_perplexity=candidate,
            kl=self._kl / positions,
            kl_largest=self._kl_largest,
            top1=self._same / positions,
        )
