"""Into how many equal shares a model can be cut: one rule for what is listed and for what is packed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.kernels.packed.module_spec import RankSharding
from tilewright.kernels.tensors import Reject, TensorSpec

from ..checkpoint.matrices import Matrix
from ..families.config import HEAD_SIZE, HEADS, KV_HEADS, text_config
from ..families.family import ModelFamily
from ..families.parallel import HEAD_NORMS
from ..plan import Degree
from .groups import ModuleGroup
from .sharding import RankSlice, rank_slice_of, sharding_of_rank

MOST = 64  # ranks that are tried


@dataclass(frozen=True)
class Cuttable:
    """Matrices that are cut in the same way.

    Attributes:
        projection: Last part of their paths.
        shape: (N, K) of each, uncut.
        experts: How many experts a stack of them has; None for a Linear.
        packed: Whether it is packed; only what is packed can be cut.
        rotated: Columns of a block of the input that is rotated, which no cut divides; 0 for none.
        undealt: Why experts cannot be dealt to ranks; empty if they can.
    """

    projection: str
    shape: tuple[int, int]
    experts: int | None = None
    packed: bool = True
    rotated: int = 0
    undealt: str = ""

    def why_not(self, sharding: RankSharding, family: ModelFamily) -> str | None:
        """Why there is no such share of it, or None if there is one."""
        rank_slice = rank_slice_of(self.projection, sharding, family.axes, self.experts is not None)
        if not self.packed and rank_slice != RankSlice():
            return "stays as it is, and only packed matrices are cut"
        if self.experts and self.experts % rank_slice.experts[1]:
            return f"{self.experts} experts are not {rank_slice.experts[1]} equal shares"
        if self.undealt and sharding.ep[1] > 1:
            return self.undealt
        columns = self.shape[1] // rank_slice.columns[1]
        if self.rotated and columns % self.rotated:
            return f"{columns} columns of each share are no blocks of {self.rotated}, in which the input is rotated"
        return rank_slice.why_not(*self.shape)


@dataclass
class Degrees:
    """What limits the number of ranks of a model, collected while its packing is planned.

    Attributes:
        family: The family of the model.
        config: Its config.json.
        cuttable: What is cut in the same way -> name of the first such module.
        uncut: What forbids to cut matrices, into however many shares.
    """

    family: ModelFamily
    config: Mapping[str, Any]
    cuttable: dict[Cuttable, str] = field(default_factory=dict)
    uncut: list[Reject] = field(default_factory=list)

    def add(self, groups: Iterable[ModuleGroup], packed: bool = True) -> None:
        """Remember modules, which may be cut only if they are packed."""
        for group in groups:
            for matrix in group.experts[0]:
                count = len(group.experts) if group.stacked else None
                rotated = matrix.stored.rotation.block if matrix.stored.rotation else 0
                cuttable = Cuttable(matrix.module.rpartition(".")[2], matrix.shape, count, packed, rotated)
                self.cuttable.setdefault(cuttable, group.name if group.stacked else matrix.module)

    def rejects(self, tp: int, ep: int) -> Iterator[Reject]:
        """Why the model cannot be cut for `tp` ranks, or its experts not be dealt to `ep`."""
        if tp > 1 and tp % ep:
            yield Reject("--ep", f"{tp} ranks are not {ep} equal groups", "choose --ep so that it divides --tp")
            return
        text = text_config(self.config)
        for key in (HEADS, KV_HEADS):
            count = text.get(key)
            if isinstance(count, int) and count % tp:
                yield Reject("config.json", f"{key} = {count} is not {tp} equal shares")
        if ep > 1 and not any(one.experts for one in self.cuttable):
            yield Reject("--ep", "there are no routed experts to deal to ranks", "cut a dense model with --tp alone")
        if tp > 1:
            yield from self.uncut
        for one, name in self.cuttable.items():
            if reason := one.why_not(sharding_of_rank(0, tp, ep), self.family):
                yield Reject(name, reason)

    def tensor_parallel(self) -> tuple[Degree, ...]:
        """Numbers of ranks that matrices can be cut for, each with the first reason against it."""
        return tuple(Degree(size, _first(self.rejects(size, 1))) for size in range(2, MOST + 1))

    def expert_parallel(self) -> tuple[Degree, ...]:
        """Numbers of ranks that experts alone can be dealt to; empty for a dense model."""
        if not any(one.experts for one in self.cuttable):
            return ()
        return tuple(Degree(size, _first(self.rejects(1, size))) for size in range(2, MOST + 1))


def _first(rejects: Iterator[Reject]) -> str | None:
    return next((f"{reject.name}: {reject.reason}" for reject in rejects), None)


def forbids_cuts(
    config: Mapping[str, Any], specs: Mapping[str, TensorSpec], matrices: Iterable[Matrix], family: ModelFamily
) -> Iterator[Reject]:
    """What of a model no rule can cut, whatever the number of ranks.

    Args:
        config: Its config.json.
        specs: All tensors of the source.
        matrices: Those that are packed.
        family: Its family.
    """
    fused = (_ending_with(family.axes.fused, name) for name, spec in specs.items() if len(spec.shape) == 2)
    for module in dict.fromkeys(matrix for matrix in fused if matrix):
        yield Reject(module, "holds several matrices in one, and no rule says how to cut it")
    text = text_config(config)
    head, heads = text.get(HEAD_SIZE), text.get(HEADS)
    for name, spec in specs.items():
        if name.endswith(HEAD_NORMS) and isinstance(head, int) and spec.shape != (head,):
            yield Reject(name, f"normalises all heads together: {list(spec.shape)}, head_dim = {head}")
        if name.rpartition(".")[0].endswith("attn") and spec.shape == (heads,):
            yield Reject(name, f"has a number for each of {heads} heads, and no rule says how to cut it")
    yield from _half_cut(matrices, family)


def _half_cut(matrices: Iterable[Matrix], family: ModelFamily) -> Iterator[Reject]:
    """Modules of which a rule cuts what makes a value, and none what takes it, or the other way round."""
    beside: dict[str, dict[str, str]] = {}  # path -> how its Linears are cut -> the first of them
    for module in (matrix.module for matrix in matrices):
        path, _, name = module.rpartition(".")
        axes = family.axes
        kind = "rows" if name in axes.rows else "columns" if name in axes.columns else "whole"
        beside.setdefault(path, {}).setdefault(kind, module)
    for kinds in beside.values():
        if "columns" in kinds and "rows" not in kinds:
            yield Reject(kinds["columns"], "would be cut, and no rule cuts what makes its input")
        elif {"rows", "whole"} <= kinds.keys() and "columns" not in kinds:
            yield Reject(kinds["rows"], f"would be cut, and no rule cuts `{kinds['whole']}` beside it")


def _ending_with(names: Sequence[str], path: str) -> str | None:
    """The beginning of a path that ends with a part called like one of `names`; None if there is none."""
    parts = path.split(".")
    places = [place for place, part in enumerate(parts) if part in names]
    return ".".join(parts[: places[-1] + 1]) if places else None
