"""Which share of each weight a rank holds when a model is cut for tensor- and expert-parallel runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.packed.module_spec import RankSharding
from tilewright.kernels.tensors import QTensor, Reject, TensorSpec

from ..families import family_of
from ..families.config import HEAD_SIZE, HEADS, KV_HEADS, text_config
from ..families.parallel import HEAD_NORMS, ParallelAxes


@dataclass(frozen=True)
class RankSlice:
    """One rank's share of a weight: number and count of equal shares.

    Attributes:
        rows: Of the rows of each part.
        columns: Of the columns; the products of all shares are to be added.
        experts: Of the experts.
    """

    rows: tuple[int, int] = (0, 1)
    columns: tuple[int, int] = (0, 1)
    experts: tuple[int, int] = (0, 1)

    def take(self, q: QTensor) -> QTensor:
        """The share of one matrix [N, K]; a block of scales that is cut in two goes to both sides."""
        if self.rows[1] == self.columns[1] == 1:
            return q
        n, k = q.shape
        rows, columns = _range(self.rows, n), _range(self.columns, k)
        fmt = q.format
        grid_rows = slice(rows.start // fmt.block_n, -(-rows.stop // fmt.block_n)) if fmt.has_scales else slice(None)
        grid_columns = slice(None)
        if fmt.block_k:
            grid_columns = slice(columns.start // fmt.block_k, -(-columns.stop // fmt.block_k))
        return QTensor(
            fmt,
            q.codes[rows, columns].contiguous(),
            None if q.scales is None else q.scales[grid_rows, grid_columns].contiguous(),
            None if q.zeros is None else q.zeros[grid_rows, grid_columns].contiguous(),
        )

    def take_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The share of a bias [N]: where products are added, the first rank's has it and the others' is zero."""
        mine = bias[_range(self.rows, len(bias))]
        return torch.zeros_like(mine) if self.columns[0] else mine

    def why_not(self, fmt: WeightFormat, n: int, k: int) -> str | None:
        """Why a matrix [N, K] has no such share, or None if it has one."""
        if n % self.rows[1]:
            return f"{n} rows are not {self.rows[1]} equal shares"
        if k % self.columns[1]:
            return f"{k} columns are not {self.columns[1]} equal shares"
        share = n // self.rows[1]
        if self.rows[1] > 1 and fmt.block_n > 1 and share % fmt.block_n and fmt.block_n % share:
            return f"{share} rows of each share span blocks of {fmt.block_n} that begin elsewhere"
        share = k // self.columns[1]
        if self.columns[1] > 1 and fmt.block_k and share % fmt.block_k and fmt.block_k % share:
            return f"{share} columns of each share span blocks of {fmt.block_k} that begin elsewhere"
        return None


def _range(share: tuple[int, int], size: int) -> slice:
    number, count = share
    return slice(size // count * number, size // count * (number + 1))


def sharding_of_rank(rank: int, tp: int, ep: int) -> RankSharding:
    """The sharding of one of `max(tp, ep)` ranks; with both, a group of tp / ep ranks shares the same experts."""
    if tp == 1:
        return RankSharding((0, 1), (rank, ep))
    return RankSharding((rank, tp), (rank // (tp // ep), ep))


def rank_slice_of(projection: str, sharding: RankSharding, axes: ParallelAxes, is_expert: bool) -> RankSlice:
    """The share of a weight whose module path ends in `projection`.

    Args:
        projection: Last part of the path, such as `q_proj`.
        sharding: The rank, and how many share the model.
        axes: How the family's Linears are cut.
        is_expert: Whether it is a routed expert's.
    """
    number, count = sharding.tp
    experts = (0, 1)
    if is_expert:
        experts = sharding.ep
        if count > 1:
            count //= sharding.ep[1]
            number %= count
    if projection in axes.rows:
        return RankSlice(rows=(number, count), experts=experts)
    if projection in axes.columns:
        return RankSlice(columns=(number, count), experts=experts)
    return RankSlice(experts=experts)


def sharding_rejects(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], tp: int, ep: int) -> Iterable[Reject]:
    """Why a model as a whole cannot be cut so.

    Args:
        config: Its config.json.
        specs: All tensors of the source.
        tp: Ranks that matrices are cut for.
        ep: Groups of ranks that experts are dealt to.
    """
    text = text_config(config)
    if tp > 1 and tp % ep:
        yield Reject("--ep", f"{tp} ranks are not {ep} equal groups", "choose --ep so that it divides --tp")
    for key in (HEADS, KV_HEADS):
        count = text.get(key)
        if isinstance(count, int) and count % tp:
            yield Reject("config.json", f"{key} = {count} is not {tp} equal shares")
    if tp == 1:
        return
    fused = family_of(config).axes.fused
    matrices = (_ending_with(fused, name) for name, spec in specs.items() if len(spec.shape) == 2)
    for module in dict.fromkeys(matrix for matrix in matrices if matrix):
        yield Reject(module, "holds several matrices in one, and no rule says how to cut it")
    head, heads = text.get(HEAD_SIZE), text.get(HEADS)
    for name, spec in specs.items():
        if name.endswith(HEAD_NORMS) and isinstance(head, int) and spec.shape != (head,):
            yield Reject(name, f"normalises all heads together: {list(spec.shape)}, head_dim = {head}")
        if name.rpartition(".")[0].endswith("attn") and spec.shape == (heads,):
            yield Reject(name, f"has a number for each of {heads} heads, and no rule says how to cut it")


def _ending_with(names: Sequence[str], path: str) -> str | None:
    """The beginning of a path that ends with a part called like one of `names`; None if there is none."""
    parts = path.split(".")
    places = [place for place, part in enumerate(parts) if part in names]
    return ".".join(parts[: places[-1] + 1]) if places else None
