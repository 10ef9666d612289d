"""Follow scales of channels that a candidate has moved from norms into the weights that read them.

Such a candidate (`--solver awq`) is the same function with other tensors. Its scales are powers of two, so they can be
read off its norms exactly; the reference is moved the same way, and is then compared as always.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from tilewright.kernels.tensors import QTensor

from ..checkpoint.contents import Contents, LogicalTensor
from ..families import known_folds
from ..families.layers import LAYER
from ..families.norms import reads


def follow_folds(reference: Contents, candidate: Contents, model_type: str) -> Contents:
    """The reference, with every norm that the candidate divided by powers of two divided by them, too.

    Args:
        reference: Where the weights come from.
        candidate: What is verified.
        model_type: Family of both; of a family without a table nothing is moved.
    """
    folds = known_folds().get(model_type, ())
    moved: dict[str, LogicalTensor] = {}
    for name, weight in reference.weights.items():
        layer = LAYER.match(name.removesuffix(".weight"))
        fold = next((fold for fold in folds if layer and layer[2] == fold.norm), None)
        found = candidate.find(name)
        if layer is None or fold is None or found is None or found.shape != weight.shape:
            continue
        factors = _powers_of_two(weight.values(), found.values())
        if factors is None:
            continue
        moved[name] = replace(weight, read=partial(_scaled, weight, 1 / factors))
        for other, reader in reference.weights.items():
            if other.startswith(f"{layer[1]}.") and reads(other.removesuffix(".weight"), fold):
                moved[other] = replace(reader, format=None, rotation=None, read=partial(_scaled, reader, factors))
    return replace(reference, weights={**reference.weights, **moved}) if moved else reference


def _powers_of_two(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """What `before` was divided by, fp32 [K], if that is a power of two everywhere and not 1 everywhere."""
    factors = torch.where(before == after, torch.ones_like(before), before / after)
    mantissa, _ = torch.frexp(factors)
    return factors if bool((mantissa == 0.5).all()) and bool((factors != 1).any()) else None


def _scaled(weight: LogicalTensor, factors: torch.Tensor) -> torch.Tensor:
    """The weight with its columns multiplied, in the type that it is stored in if that is a plain one."""
    stored = weight.read()
    if isinstance(stored, QTensor):
        return weight.values() * factors
    return (stored.to(torch.float32) * factors).to(stored.dtype)
