"""Experts that the source held in one tensor: which rows of it the parts of a packed module are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..tensors import Reject
from .safetensors_file import MAX_SIZE


def whole_number(value: object) -> int:
    """The value itself.

    Raises:
        ValueError: It is no integer, or one that no size or count can have.
    """
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise ValueError(f"{str(value)[:50]} is no size or number")
    return value


@dataclass(frozen=True)
class SourceStack:
    """One tensor of the source that held the matrices of all experts, of which the parts of a module are some rows.

    Attributes:
        name: Path of the stack, to which names of its tensors add `_<suffix>`.
        rows: Start, stop and step of the rows of each part in the matrix of one expert.
    """

    name: str
    rows: tuple[tuple[int, int, int], ...]

    @property
    def order(self) -> torch.Tensor:
        """Row of the parts, one after the other, for each row of the stack's matrix: int64 [N]."""
        return torch.tensor([row for rows in self.rows for row in range(*rows)]).argsort()

    def why_not(self, n: int) -> Reject | None:
        """Why its parts are not the rows of a matrix of `n`, or None if they are."""
        parts = len(self.rows)
        size = n // parts if parts and n % parts == 0 else 0
        in_turn = [(part, n, parts) for part in range(parts)]
        in_order = [(part * size, (part + 1) * size, 1) for part in range(parts)]
        if size and sorted(self.rows) in (in_turn, in_order):
            return None
        return Reject("stack", f"{[list(rows) for rows in self.rows]} are no equal parts of a matrix of {n} rows")

    def to_json(self) -> dict[str, Any]:
        """The field `stack` of a description."""
        return {"name": self.name, "rows": [list(rows) for rows in self.rows]}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> SourceStack:
        """The inverse of `to_json`."""
        rows = [tuple(whole_number(number) for number in part) for part in fields["rows"]]
        return SourceStack(str(fields["name"]), tuple((start, stop, step) for start, stop, step in rows))
