"""Follow scales of channels that a candidate has moved from norms and Linears into the weights that read them.

Such a candidate (`--solver awq`, `smooth`) is the same function with other tensors. Its scales are powers of two, so
they can be read off its norms exactly, and off the rows of its Linears, whose lengths rounding changes by far less than
a factor of two; the reference is moved the same way, and is then compared as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from tilewright.kernels.tensors import QTensor

from ..checkpoint.contents import Contents, LogicalTensor
from ..families import known_folds, known_passages
from ..families.layers import LAYER
from ..families.norms import Passage, of_columns, reads


def follow_folds(reference: Contents, candidate: Contents, model_type: str, head: int = 0) -> Contents:
    """The reference, with every norm that the candidate divided by powers of two divided by them, too.

    Args:
        reference: Where the weights come from.
        candidate: What is verified.
        model_type: Family of both; of a family without a table nothing is moved.
        head: Channels of an attention head.
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
                moved[other] = _replaced(reader, factors)
    if not moved and not candidate.smoothed:
        return reference
    weights = {**reference.weights, **moved}
    if candidate.smoothed:
        _follow_passages(weights, candidate, known_passages().get(model_type, ()), head)
    return replace(reference, weights=weights)


def _follow_passages(
    weights: dict[str, LogicalTensor], candidate: Contents, passages: Sequence[Passage], head: int
) -> None:
    """Move scales from the rows of Linears into the columns that read them, as the candidate has it; in place."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        if name.endswith(".weight") and (layer := LAYER.match(name.removesuffix(".weight"))):
            layers.setdefault(layer[1], []).append(layer[2])
    for path, modules in layers.items():
        pairs = [pair for passage in passages for pair in passage.pairs(modules)]
        for writer, reader in ((f"{path}.{writer}", f"{path}.{reader}") for writer, reader in pairs):
            rows, columns = weights[f"{writer}.weight"], weights[f"{reader}.weight"]
            found = candidate.find(rows.name)
            repeats = columns.shape[1] // rows.shape[0]
            if found is None or found.shape != rows.shape or repeats * rows.shape[0] != columns.shape[1]:
                continue
            factors = torch.exp2((rows.values().norm(dim=1) / found.values().norm(dim=1)).log2().round())
            factors = torch.where(factors.isfinite() & (factors > 0), factors, torch.ones_like(factors))
            if bool((factors == 1).all()):
                continue
            for name in (rows.name, f"{writer}.bias"):
                if name in weights:
                    weights[name] = _replaced(
                        weights[name], (1 / factors).view(-1, *[1] * (len(weights[name].shape) - 1))
                    )
            weights[columns.name] = _replaced(columns, of_columns(factors, repeats, head))


def _replaced(weight: LogicalTensor, factors: torch.Tensor) -> LogicalTensor:
    return replace(weight, format=None, rotation=None, read=partial(_scaled, weight, factors))


def _powers_of_two(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """What `before` was divided by, fp32 [K], if that is a power of two everywhere and not 1 everywhere."""
    factors = torch.where(before == after, torch.ones_like(before), before / after)
    mantissa, _ = torch.frexp(factors)
    return factors if bool((mantissa == 0.5).all()) and bool((factors != 1).any()) else None


def _scaled(weight: LogicalTensor, factors: torch.Tensor) -> torch.Tensor:
    """The weight times `factors`, in the type that it is stored in if that is a plain one."""
    stored = weight.read()
    if isinstance(stored, QTensor):
        return weight.values() * factors
    return (stored.to(torch.float32) * factors).to(stored.dtype)
