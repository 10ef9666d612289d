"""Experts stored as one 3-D tensor per projection: which axis is which, and which rows are gate and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.tensors import QTensor, Reject

from ..families import text_config
from ..families.base import STACK, Architecture, ExpertsOrder
from .base import Reader, SourceWeight

MERGED = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}
DOWN = ("down_proj", "w2")


@dataclass(frozen=True)
class StackLayout:
    """How the experts of one layer lie in their stacks.

    Attributes:
        transposed: Matrices are [K, N] instead of [N, K].
        order: Order of gate and up in a merged stack.
    """

    transposed: bool
    order: ExpertsOrder


@dataclass(frozen=True)
class TransposedReader:
    """Reads a matrix that is stored [K, N]."""

    inner: Reader

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Reader.rows`."""
        return self.inner.rows([tensor.T for tensor in tensors], rows)

    def raw(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Reader.raw`."""
        return tensors[0].T[rows]

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Reader.codes`."""
        return self.inner.codes([tensor.T for tensor in tensors], fmt)


def container_of(module: str) -> str | None:
    """The `….experts` path that a stack belongs to, or None if the module is no stack."""
    found = STACK.match(module)
    return found["container"] if found else None


def output_rows(module: str, n: int, order: ExpertsOrder) -> dict[str, tuple[int, int, int]]:
    """Projection -> (start, stop, step) of its rows in the stack `module` of `n` rows."""
    found = STACK.match(module)
    assert found
    projection = found["projection"]
    if projection not in MERGED:
        return {projection: (0, n, 1)}
    gate, up = MERGED[projection]
    half = n // 2
    if order == "interleaved":
        return {gate: (0, n, 2), up: (1, n, 2)}
    first, second = (gate, up) if order == "gate-up" else (up, gate)
    return {first: (0, half, 1), second: (half, n, 1)}


def decide(
    stacks: Sequence[SourceWeight],
    config: Mapping[str, Any],
    architecture: Architecture,
    order: ExpertsOrder | None,
    transposed: bool,
) -> StackLayout | Reject:
    """The layout of the stacks of one layer, from their shapes and the model's hidden size.

    Args:
        stacks: The stacks of one container.
        config: config.json of the source.
        architecture: The family, which knows the order of gate and up.
        order: What --experts-order says.
        transposed: Whether --experts-transposed was given.

    Returns:
        The layout, or why there is none. All stacks of a layer share it, so one that is square on its own is decided
        by the others.
    """
    hidden = text_config(config).get("hidden_size")
    votes: dict[bool, SourceWeight] = {}
    for stack in stacks:
        a, b = stack.shape[1:]
        if hidden is not None and hidden not in {a, b}:
            return Reject(stack.tensors[0], f"is {list(stack.shape)}, and neither side is hidden_size = {hidden}")
        if a != b and hidden is not None:
            votes[(a == hidden) != stack.module.endswith(DOWN)] = stack
        if stack.module.endswith(tuple(MERGED)) and a % 2 and b % 2:
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
    if not votes and not transposed and order is None:
        return Reject(
            first.tensors[0],
            f"is {list(first.shape)} with hidden_size = {hidden}: shapes do not tell rows from columns",
            "declare it: --experts-order gate-up, with --experts-transposed if it is stored [in, out]",
        )
    return StackLayout(transposed or True in votes, order or architecture.experts_order or "gate-up")


def transposable(stack: SourceWeight) -> bool:
    """Whether the stack can be read transposed: its scales, if any, lie in a grid of square blocks."""
    return not stack.quantized or stack.encoding == "block 128x128 FP8"
