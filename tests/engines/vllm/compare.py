"""How far two runs of a model are apart."""

from __future__ import annotations

import torch

BOUND = 1e-3  # nats a token, for the same numbers in another order


def divergence(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL divergence in nats a token of logarithms of probabilities [T, V]."""
    return float((reference.exp() * (reference - found)).sum(-1).mean())
