"""Which matrices of a source become one packed module: a Linear, Linears of one input, experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.layouts.cpu_blocks import row_unit
from tilewright.kernels.packed.module_spec import RankSharding
from tilewright.kernels.packed.source_stack import SourceStack
from tilewright.kernels.tensors import Reject

from ..checkpoint.matrices import Matrix
from ..families.config import expert_count, has_zero_experts
from ..families.experts import ExpertSpellings
from ..families.family import ModelFamily
from ..families.parallel import ParallelAxes
from .sharding import RankSlice, rank_slice_of


@dataclass(frozen=True)
class ModuleGroup:
    """Matrices that become one packed module.

    Attributes:
        name: The packed module.
        experts: For each expert (the only one, for a Linear) the matrices that lie one under the other.
        stacked: Whether the module has a dimension of experts.
        rank_slice: Which share of them this rank holds.
        leading: Rows and columns of zeros that are put before each share.
    """

    name: str
    experts: tuple[tuple[Matrix, ...], ...]
    stacked: bool = False
    rank_slice: RankSlice = RankSlice()
    leading: tuple[int, int] = (0, 0)

    @property
    def parts(self) -> int:
        """Equal parts, each padded and scaled on its own: the matrices of an expert; joined Linears need no padding."""
        return len(self.experts[0]) if self.stacked else 1

    @property
    def joined(self) -> tuple[int, ...]:
        """Rows of this rank's share of each Linear, if they are several; else empty."""
        if self.stacked or len(self.experts[0]) == 1:
            return ()
        return tuple(weight.shape[0] // self.rank_slice.rows[1] for weight in self.experts[0])

    @property
    def is_tied_head(self) -> bool:
        """Whether it is made of a matrix that also stays where it is: the embedding, which serves as head."""
        return not self.stacked and len(self.experts[0]) == 1 and self.experts[0][0].module != self.name

    @property
    def numbers(self) -> range:
        """Numbers of the experts that this rank holds."""
        number, count = self.rank_slice.experts
        mine = len(self.experts) // count
        return range(mine * number, mine * (number + 1))

    @property
    def matrix(self) -> tuple[int, int]:
        """Logical shape of this rank's share of one expert."""
        n, k = self.whole[-2:]
        return n // self.rank_slice.rows[1], k // self.rank_slice.columns[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the packed module."""
        return (len(self.numbers), *self.matrix) if self.stacked else self.matrix

    @property
    def whole(self) -> tuple[int, ...]:
        """Logical shape that it would have uncut."""
        n = sum(weight.shape[0] for weight in self.experts[0])
        k = self.experts[0][0].shape[1]
        return (len(self.experts), n, k) if self.stacked else (n, k)

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of the source modules of the parts, `{}` in place of the number of an expert."""
        names = [weight.module for weight in self.experts[0]]
        if not self.stacked:
            return tuple(names)
        parts = [name.rsplit(".", 2) for name in names]
        return tuple(f"{container}.{{}}.{projection}" for container, _, projection in parts)

    @property
    def source_stack(self) -> SourceStack | None:
        """The stack of quantized experts that it is made of, which comes back as one; None if it is made of others."""
        first = self.experts[0][0]
        if first.alone or not first.stored.quantized:
            return None
        return SourceStack(first.stored.module, tuple(matrix.rows for matrix in self.experts[0]))


def shares_of(
    groups: Sequence[ModuleGroup], fmt: WeightFormat, sharding: RankSharding, axes: ParallelAxes
) -> list[ModuleGroup]:
    """A rank's share of each group of a Linear or of experts; the groups as they are where there is no such share."""
    made = []
    for group in groups:
        first = group.experts[0][0]
        rank_slice = rank_slice_of(_tail(first.module), sharding, axes, group.stacked)
        if rank_slice.why_not(*first.shape) or len(group.experts) % rank_slice.experts[1]:
            return list(groups)
        made.append(replace(group, rank_slice=rank_slice, leading=rank_slice.leading(fmt, *first.shape)))
    if groups[0].stacked:  # the rows of gate and up are the columns of down
        inner = max(max(group.leading) for group in made)
        made = [replace(group, leading=(inner, 0) if group.parts > 1 else (0, inner)) for group in made]
    return made


def split_zero_experts(
    weights: Sequence[Matrix], experts: ExpertSpellings, config: Mapping[str, Any]
) -> tuple[list[Matrix], list[Matrix]]:
    """The matrices of experts that compute, and those stored for experts that compute nothing, which come after."""
    count = expert_count(config) if has_zero_experts(config) else None
    numbers = [path.number or 0 if (path := experts.find(weight.module)) else 0 for weight in weights]
    is_zero = [count is not None and number >= count for number in numbers]
    pairs = list(zip(weights, is_zero, strict=True))
    return [weight for weight, zero in pairs if not zero], [weight for weight, zero in pairs if zero and weight.alone]


def without_gate(weights: Sequence[Matrix], experts: ExpertSpellings) -> bool:
    """Whether these are experts of two matrices: `down(act(up x))`, which no operator runs as a stack."""
    kinds = {experts.projections[path.name] for weight in weights if (path := experts.find(weight.module))}
    return kinds == {"up", "down"}


def group_experts(stack: str, weights: Sequence[Matrix], experts: ExpertSpellings) -> list[ModuleGroup] | Reject:
    """Gate over up of every expert as `w13`, down as `w2`.

    Args:
        stack: Path of the experts, without their numbers.
        weights: Every matrix below it.
        experts: How the family calls them.

    Returns:
        The two groups, or why these matrices are no stack.
    """
    members: dict[tuple[int, str], Matrix] = {}
    for weight in weights:
        path = experts.find(weight.module)
        assert path
        assert path.number is not None
        members[path.number, experts.projections[path.name]] = weight
    numbers = range(len(members) // 3)
    if set(members) != {(number, kind) for number in numbers for kind in ("gate", "up", "down")}:
        kinds = ", ".join(sorted({kind for _, kind in members}))
        return Reject(stack, f"{len(members)} matrices ({kinds}) are not experts 0, 1, ... with gate, up and down each")
    if len({(kind == "down", weight.shape, weight.stored.encoding) for (_, kind), weight in members.items()}) != 2:
        kinds = ", ".join(sorted({f"{weight.stored.encoding} {list(weight.shape)}" for weight in weights}))
        return Reject(stack, f"experts of different kinds cannot be stacked: {kinds}")
    upper = tuple((members[number, "gate"], members[number, "up"]) for number in numbers)
    lower = tuple((members[number, "down"],) for number in numbers)
    return [ModuleGroup(f"{stack}.w13", upper, True), ModuleGroup(f"{stack}.w2", lower, True)]


@dataclass(frozen=True)
class Linear:
    """A Linear of the source that may be joined with others.

    Attributes:
        weight: Its matrix.
        format: What it is packed in; None if it stays as it is.
        bias: dtype of its bias, or None.
    """

    weight: Matrix
    format: WeightFormat | None
    bias: torch.dtype | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What is the same for Linears that can be joined."""
        stored = self.weight.stored
        suffixes = tuple(name.removeprefix(stored.module) for name in stored.tensors)
        return self.format, self.weight.shape[1], self.bias, stored.encoding, suffixes

    def __str__(self) -> str:
        bias = f" with bias {self.bias}" if self.bias else ""
        return f"{_tail(self.weight.module)} {self.weight.stored.encoding} {list(self.weight.shape)}{bias}"


def join_linears(
    linears: Mapping[str, Linear], sharding: RankSharding, family: ModelFamily
) -> Iterator[ModuleGroup | Reject]:
    """Linears that are multiplied by the same input, as one, if the packed bytes of each stay what they are alone.

    Args:
        linears: All Linears of a model by name.
        sharding: The rank's cut; each Linear is cut on its own.
        family: The family, which knows what is merged.

    Yields:
        A group for Linears that can be joined, or why they cannot; nothing for those that are not packed.
    """
    for first in linears:
        path = first.removesuffix(_tail(first))
        for name, tails in ((merged.name, merged.parts) for merged in family.merged if merged.packed):
            if _tail(first) != tails[0] or path + name in linears or any(path + tail not in linears for tail in tails):
                continue
            parts = [linears[path + tail] for tail in tails]
            if any(part.format for part in parts):
                reason = _why_not_joined(parts, rank_slice_of(tails[0], sharding, family.axes, is_expert=False))
                weights = tuple(part.weight for part in parts)
                yield Reject(path + name, reason) if reason else ModuleGroup(path + name, (weights,))


def _why_not_joined(parts: Sequence[Linear], rank_slice: RankSlice) -> str | None:
    fmt = parts[0].format
    if len({part.kind for part in parts}) > 1 or fmt is None:
        return f"its parts differ: {', '.join(map(str, parts))}"
    rows, unit = [part.weight.shape[0] for part in parts], row_unit(fmt)
    if any(n % (rank_slice.rows[1] * unit) for n in rows):
        each = f" for each of {rank_slice.rows[1]} ranks" if rank_slice.rows[1] > 1 else ""
        return f"its parts of {', '.join(map(str, rows))} rows are no whole blocks of {unit}{each}"
    return None


def _tail(module: str) -> str:
    return module.rpartition(".")[2]
