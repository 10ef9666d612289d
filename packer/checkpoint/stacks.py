"""Experts stored as one 3-D tensor per projection: which axis is which, and which rows are gate and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.tensors import Reject

from ..families.config import HIDDEN, text_config
from ..families.experts import ExpertsOrder, ExpertSpellings
from ..families.family import ModelFamily
from .encoding import StoredWeight


@dataclass(frozen=True)
class StackLayout:
    """How the experts of one layer lie in their stacks.

    Attributes:
        transposed: Matrices are [K, N] instead of [N, K].
        order: Order of gate and up in a merged stack.
    """

    transposed: bool
    order: ExpertsOrder


def stacks_of(weights: Sequence[StoredWeight], experts: ExpertSpellings) -> dict[str, list[StoredWeight]]:
    """Path of the experts of a layer -> its stacks."""
    stacks: dict[str, list[StoredWeight]] = {}
    for weight in weights:
        if len(weight.shape) == 3 and (path := experts.find_stack(weight.module)):
            stacks.setdefault(path.container, []).append(weight)
    return stacks


def output_rows(experts: ExpertSpellings, name: str, n: int, order: ExpertsOrder) -> dict[str, tuple[int, int, int]]:
    """Projection -> (start, stop, step) of its rows in a stack called `name` of `n` rows."""
    parts = experts.stacks[name]
    if len(parts) == 1:
        return {parts[0]: (0, n, 1)}
    gate, up = parts
    half = n // 2
    if order == "interleaved":
        return {gate: (0, n, 2), up: (1, n, 2)}
    first, second = (gate, up) if order == "gate-up" else (up, gate)
    return {first: (0, half, 1), second: (half, n, 1)}


def decide(
    stacks: Sequence[StoredWeight],
    config: Mapping[str, Any],
    family: ModelFamily,
    order: ExpertsOrder | None = None,
    transposed: bool = False,
) -> StackLayout | Reject:
    """The layout of the stacks of one layer, from their shapes and the model's hidden size.

    Args:
        stacks: The stacks of one container.
        config: config.json of the source.
        family: The family, which knows the order of gate and up.
        order: What --experts-order says.
        transposed: Whether --experts-transposed was given.

    Returns:
        The layout, or why there is none. All stacks of a layer share it, so one that is square on its own is decided
        by the others.
    """
    hidden = text_config(config).get(HIDDEN)
    votes: dict[bool, StoredWeight] = {}
    for stack in stacks:
        a, b = stack.shape[1:]
        path = family.experts.find_stack(stack.module)
        assert path
        if hidden is not None and hidden not in {a, b}:
            return Reject(stack.tensors[0], f"is {list(stack.shape)}, and neither side is hidden_size = {hidden}")
        if a != b and hidden is not None:
            is_down = family.experts.projections[family.experts.stacks[path.name][0]] == "down"
            votes[(a == hidden) != is_down] = stack
        if len(family.experts.stacks[path.name]) == 2 and a % 2 and b % 2:
            return Reject(stack.tensors[0], f"is {list(stack.shape)}: gate and up cannot be halves of an odd side")
    first = stacks[0]
    if len(votes) == 2:
        return Reject(
            votes[True].tensors[0], f"is stored [in, out], but `{votes[False].tensors[0]}` is stored [out, in]"
        )
    if transposed and votes.get(False):
        return Reject(
            votes[False].tensors[0],
            f"is {list(votes[False].shape)} with hidden_size = {hidden}: not transposed, as --experts-transposed says",
        )
    if not votes and not transposed and order is None and not all(stack.foreign for stack in stacks):
        return Reject(
            first.tensors[0],
            f"is {list(first.shape)} with hidden_size = {hidden}: shapes do not tell rows from columns",
            "declare it: --experts-order gate-up, with --experts-transposed if it is stored [in, out]",
        )
    return StackLayout(transposed or True in votes, order or family.experts_order or "gate-up")
