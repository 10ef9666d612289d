"""How much of what could be quantized is, and what no rule knows: nothing stays in 16 bits without a word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.kernels.tensors import Reject, TensorSpec

from ..families.roles import KEPT
from ..folding import pattern, with_ranges
from .decisions import BY_FORM, EXCLUDED, MTP_KEPT, AnyDecision

ON_PURPOSE = (EXCLUDED, MTP_KEPT, BY_FORM)  # reasons for 16 bits that were asked for
SHOWN = 6  # kinds of names in one message


@dataclass(frozen=True)
class Coverage:
    """The weights of Linears, of experts, and of matrices that no rule knows.

    What keeps its 16 bits by its role (embeddings, heads, routers, norms, vision parts) or because the request says so
    is not counted.

    Attributes:
        quantized: How many of them are quantized.
        left: Name of each tensor of Linears and experts that stays in 16 bits -> number of its weights.
        unknown: The same for matrices that no rule knows.
    """

    quantized: int
    left: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of weights that are counted."""
        return self.quantized + sum(self.left.values()) + sum(self.unknown.values())

    @property
    def share(self) -> float:
        """Which part of them is quantized; 1 where there are none."""
        return self.quantized / self.total if self.total else 1.0

    def notes(self) -> list[str]:
        """A line about matrices that no rule knows, if there are any."""
        count = sum(self.unknown.values())
        if not count:
            return []
        share = f"{100 * count / self.total:.1f} % of the weights in matrices ({count} of {self.total})"
        names = f"no architecture rule knows their names: {_folded(self.unknown)}"
        return [f"{share} stay in 16 bits, {names}; --include PATTERN quantizes those that are Linears"]

    def against(self, least: float) -> list[Reject]:
        """Why a request for at least this share is refused; empty if it is not."""
        if self.share >= least:
            return []
        left = _folded({**self.unknown, **self.left})
        reason = f"{100 * self.share:.1f} % of the weights that could be quantized would be; in 16 bits stay {left}"
        hint = "--include PATTERN quantizes names that no rule knows; see --dry-run for the reasons"
        return [Reject(f"--min-coverage {least:g}", reason, hint)]


def coverage_of(decisions: Iterable[AnyDecision], specs: Mapping[str, TensorSpec]) -> Coverage:
    """Count what the decisions quantize and leave."""
    quantized = 0
    sizes: dict[int, int] = {}  # of what is quantized: the same for all of a kind
    left: dict[str, int] = {}
    unknown: dict[str, int] = {}
    for decision in decisions:
        if id(decision.first) in sizes:
            quantized += sizes[id(decision.first)]
            continue
        name = decision.names[0]
        if decision.action == "drop" or any(reason in decision.reason for reason in ON_PURPOSE):
            continue
        size = _size(decision, specs[name])
        if decision.quantized:
            quantized += size
            sizes[id(decision.first)] = size
        elif decision.role == "other" and decision.reason == KEPT["other"]:
            if len(specs[name].shape) in {2, 3}:
                unknown[name] = unknown.get(name, 0) + size
        elif decision.role not in KEPT and decision.weight:
            left[name] = left.get(name, 0) + size
    return Coverage(quantized, left, unknown)


def _size(decision: AnyDecision, spec: TensorSpec) -> int:
    if decision.weight is None or decision.index is None:
        return math.prod(decision.weight.shape if decision.weight else spec.shape)
    return sum(math.prod(matrix.shape) for matrix in decision.matrices)


def _folded(names: Mapping[str, int]) -> str:
    """Names that differ only in their numbers as one, the heaviest first."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(pattern(name), []).append(name)
    ordered: Sequence[list[str]] = sorted(kinds.values(), key=lambda kind: -sum(names[name] for name in kind))
    more = f" and {len(ordered) - SHOWN} more kinds" if len(ordered) > SHOWN else ""
    return ", ".join(with_ranges(kind) for kind in ordered[:SHOWN]) + more
