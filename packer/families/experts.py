"""How the matrices of routed experts are called, apart and in stacks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ExpertsOrder = Literal["gate-up", "up-gate", "interleaved"]
Projection = Literal["gate", "up", "down"]


@dataclass(frozen=True)
class ExpertNames:
    """One spelling of the matrices of an expert: `down(act(gate x) * up x)`.

    Attributes:
        gate: The matrix whose product goes through the activation.
        up: The one whose product it is multiplied with.
        down: The one that brings the result back.
        gate_up: What a stack of gate and up of every expert is called; empty where there is none.
        container: Last parts of the path under which the experts of a layer stand.
        down_stack: What a stack of the third matrix is called, where it has a name of its own.
        stacked_in: Last parts of the path under which stacks stand, where it is not `container`.
    """

    gate: str
    up: str
    down: str
    gate_up: str = ""
    container: str = "experts"
    down_stack: str = ""
    stacked_in: str = ""

    @property
    def stack_container(self) -> str:
        """Last parts of the path under which stacks stand."""
        return self.stacked_in or self.container

    @property
    def projections(self) -> dict[str, Projection]:
        """Name of a matrix -> which of the three it is."""
        return {self.gate: "gate", self.up: "up", self.down: "down"}

    @property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """Name of a stack -> the matrices of an expert that it holds, gate first."""
        merged = {self.gate_up: (self.gate, self.up)} if self.gate_up else {}
        if self.down_stack:
            return merged | {self.down_stack: (self.down,)}
        return merged | {name: (name,) for name in self.projections}


LONG = ExpertNames("gate_proj", "up_proj", "down_proj", "gate_up_proj")
SHORT = ExpertNames("w1", "w3", "w2", "w13")


@dataclass(frozen=True)
class ExpertPath:
    """A module path taken apart.

    Attributes:
        container: Path of the experts of the layer.
        name: Name of the matrix or of the stack.
        number: Which expert; None for a stack of them all.
    """

    container: str
    name: str
    number: int | None = None


@dataclass(frozen=True)
class ExpertSpellings:
    """The spellings that a family uses.

    Attributes:
        names: Each of them.
        read_stacked_by: Who reads the experts of this family only in stacks; empty where all read them one by one.
    """

    names: tuple[ExpertNames, ...] = (LONG, SHORT)
    read_stacked_by: str = ""

    @cached_property
    def projections(self) -> dict[str, Projection]:
        """Name of a matrix -> which of the three it is."""
        return {name: kind for names in self.names for name, kind in names.projections.items()}

    @cached_property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """Name of a stack -> the matrices of an expert that it holds, gate first."""
        return {name: parts for names in self.names for name, parts in names.stacks.items()}

    @cached_property
    def _container(self) -> str:
        return rf"(?:.*\.)?(?:{_any(names.container for names in self.names)})"

    @cached_property
    def _expert(self) -> re.Pattern[str]:
        return re.compile(rf"^({self._container})\.(\d+)\.({_any(self.projections)})$")

    @cached_property
    def _stack(self) -> re.Pattern[str]:
        kinds = (rf"{re.escape(names.stack_container)}\.(?:{_any(names.stacks)})" for names in self.names)
        return re.compile(rf"^((?:.*\.)?(?:{'|'.join(kinds)}))(?:_(\w+))?$")

    @cached_property
    def _inverted(self) -> re.Pattern[str]:
        containers = _any(names.container for names in self.names)
        return re.compile(rf"\.({containers})\.({_any(self.projections)})\.(\d+)(?=\.|$)")

    @cached_property
    def _containers(self) -> tuple[str, ...]:
        return tuple(f".{names.container}." for names in self.names)

    @staticmethod
    def _is_followed_by_a_name(path: str, part: str) -> bool:
        """Whether something other than a number follows the last `part` of a path."""
        end = path.rfind(part) + len(part)
        return end >= len(part) and not path[end : end + 1].isdigit()

    def find(self, module: str) -> ExpertPath | None:
        """The parts of the path of one expert's matrix, `….experts.7.up_proj`; None for any other module."""
        found = self._expert.match(module)
        return ExpertPath(found[1], found[3], int(found[2])) if found else None

    def find_stack(self, module: str) -> ExpertPath | None:
        """The parts of the path of a stack, `….experts.up_proj`; None for any other module."""
        found = self._stack.match(module)
        if not found or found[2]:
            return None
        stem, _, name = module.rpartition(".")
        spelled = next(
            names for names in self.names if name in names.stacks and f".{stem}".endswith(f".{names.stack_container}")
        )
        return ExpertPath(stem.removesuffix(spelled.stack_container) + spelled.container, name)

    def container(self, module: str) -> str | None:
        """The path of the experts that a matrix of an expert or a stack belongs to; None for any other module."""
        found = self.find(module) or self.find_stack(module)
        return found.container if found else None

    def split_stack(self, name: str) -> tuple[str, str] | None:
        """Path of a stack and what follows it in the name of a tensor beside it: `….experts.up_proj_scale_inv`."""
        found = self._stack.match(name)
        return (found[1], found[2]) if found and found[2] else None

    def canonical(self, name: str) -> str:
        """One order for the two ways to name an expert: `experts.gate_proj.7` -> `experts.7.gate_proj`."""
        if not any(self._is_followed_by_a_name(name, part) for part in self._containers):
            return name  # nearly always, and cheaper to see than the regex is to try
        return self._inverted.sub(r".\1.\3.\2", name)

    def short(self, module: str) -> str:
        """The path with the matrix called `w1`, `w2` or `w3`, as some engines do for its activation scale."""
        stem, _, name = module.rpartition(".")
        kind = self.projections.get(name)
        return f"{stem}.{getattr(SHORT, kind)}" if kind else module


def _any(names: Iterable[str]) -> str:
    """A regex for any of the names, longer ones first."""
    return "|".join(map(re.escape, sorted(dict.fromkeys(names), key=len, reverse=True)))
