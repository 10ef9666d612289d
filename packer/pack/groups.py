"""Which matrices of a source become one packed module: a Linear alone, the experts of a layer together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.kernels.tensors import Reject

from ..sources.base import SourceWeight
from .cuts import Share

EXPERT = re.compile(r"^(?P<stack>.*\.experts)\.(?P<number>\d+)\.(?P<projection>\w+)$")
PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@dataclass(frozen=True)
class Group:
    """Matrices that become one packed module.

    Attributes:
        name: The packed module.
        experts: For each expert (the only one, for a Linear) the matrices that lie one under the other.
        stacked: Whether the module has a dimension of experts.
        share: Which share of them this rank holds.
    """

    name: str
    experts: tuple[tuple[SourceWeight, ...], ...]
    stacked: bool = False
    share: Share = Share()

    @property
    def parts(self) -> int:
        """Matrices one under the other."""
        return len(self.experts[0])

    @property
    def numbers(self) -> range:
        """Numbers of the experts that this rank holds."""
        number, count = self.share.experts
        mine = len(self.experts) // count
        return range(mine * number, mine * (number + 1))

    @property
    def matrix(self) -> tuple[int, int]:
        """Logical shape of this rank's share of one expert."""
        n, k = self.experts[0][0].shape
        return n // self.share.rows[1] * self.parts, k // self.share.columns[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the packed module."""
        return (len(self.numbers), *self.matrix) if self.stacked else self.matrix

    @property
    def whole(self) -> tuple[int, ...]:
        """Logical shape that it would have uncut."""
        n, k = self.experts[0][0].shape
        return (len(self.experts), n * self.parts, k) if self.stacked else (n * self.parts, k)

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of the source modules of the parts, `{}` in place of the number of an expert."""
        names = (weight.module for weight in self.experts[0])
        return tuple(EXPERT.sub(r"\g<stack>.{}.\g<projection>", name) if self.stacked else name for name in names)


def group_experts(stack: str, weights: Sequence[SourceWeight]) -> list[Group] | Reject:
    """Gate over up of every expert as `w13`, down as `w2`.

    Args:
        stack: Path of the experts, without their numbers.
        weights: Every matrix below it.

    Returns:
        The two groups, or why these matrices are no stack.
    """
    members: dict[tuple[int, str], SourceWeight] = {}
    for weight in weights:
        match = EXPERT.match(weight.module)
        assert match
        members[int(match["number"]), PROJECTIONS.get(match["projection"], match["projection"])] = weight
    numbers = range(len(members) // 3)
    if set(members) != {(number, kind) for number in numbers for kind in ("gate", "up", "down")}:
        kinds = ", ".join(sorted({kind for _, kind in members}))
        return Reject(stack, f"{len(members)} matrices ({kinds}) are not experts 0, 1, ... with gate, up and down each")
    if len({(kind == "down", weight.shape, weight.encoding) for (_, kind), weight in members.items()}) != 2:
        kinds = ", ".join(sorted({f"{weight.encoding} {list(weight.shape)}" for weight in weights}))
        return Reject(stack, f"experts of different kinds cannot be stacked: {kinds}")
    upper = tuple((members[number, "gate"], members[number, "up"]) for number in numbers)
    lower = tuple((members[number, "down"],) for number in numbers)
    return [Group(f"{stack}.w13", upper, True), Group(f"{stack}.w2", lower, True)]
