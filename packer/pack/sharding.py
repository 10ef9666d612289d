"""Which share of each weight a rank holds when a model is cut for tensor- and expert-parallel runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.packed.module_spec import RankSharding
from tilewright.kernels.tensors import QTensor

from ..families.parallel import ParallelAxes


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

    def leading(self, fmt: WeightFormat, n: int, k: int) -> tuple[int, int]:
        """Rows and columns before the share of a matrix [N, K], back to the edge of a block of scales.

        None where the share lies inside one block: its scales are then a grid of their own.
        """
        return (_inside(_range(self.rows, n), fmt.block_n), _inside(_range(self.columns, k), fmt.block_k))

    def take(self, q: QTensor, leading: tuple[int, int] = (0, 0)) -> QTensor:
        """The share of one matrix [N, K]; a block of scales that is cut in two goes to both sides.

        Args:
            q: The matrix.
            leading: Rows and columns of zeros to put before it.
        """
        if self.rows[1] == self.columns[1] == 1:
            return q
        share = self._take(q)
        return with_leading(share, leading) if any(leading) else share

    def _take(self, q: QTensor) -> QTensor:
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

    def take_bias(self, bias: torch.Tensor, leading: int = 0) -> torch.Tensor:
        """The share of a bias [N]: where products are added, the first rank's has it and the others' is zero.

        Args:
            bias: The bias.
            leading: Zeros to put before it.
        """
        mine = bias[_range(self.rows, len(bias))]
        mine = torch.zeros_like(mine) if self.columns[0] else mine
        return torch.cat((mine.new_zeros(leading), mine)) if leading else mine

    def why_not(self, n: int, k: int) -> str | None:
        """Why a matrix [N, K] has no such share, or None if it has one."""
        if n % self.rows[1]:
            return f"{n} rows are not {self.rows[1]} equal shares"
        if k % self.columns[1]:
            return f"{k} columns are not {self.columns[1]} equal shares"
        return None


def _inside(share: slice, block: int) -> int:
    """How far inside a block a share begins that does not end in the same one."""
    if not block or share.start // block == (share.stop - 1) // block:
        return 0
    return int(share.start % block)


def with_leading(q: QTensor, leading: tuple[int, int]) -> QTensor:
    """The matrix with rows and columns of zeros before it: they belong to its first blocks, or are blocks of their own.

    Args:
        q: A matrix [N, K] whose first block of scales reaches back over the zeros, where blocks are larger than 1.
        leading: How many rows and columns.
    """
    rows, columns = leading
    fmt, (n, k) = q.format, q.codes.shape
    own = fmt.block_n == 1  # scales of rows of their own
    codes = torch.full((rows + n, columns + k), fmt.zero_point, dtype=torch.uint8).view(fmt.code_dtype)
    bits = codes.view(torch.uint8)
    if q.zeros is not None:
        bits[rows:, :columns] = q.zeros[:, :1]
    bits[rows:, columns:] = q.codes.view(torch.uint8)
    scales, zeros = q.scales, q.zeros
    if own and scales is not None:
        scales = torch.cat((scales.new_ones(rows, scales.shape[1]), scales))
    if own and zeros is not None:
        zeros = torch.cat((zeros.new_full((rows, zeros.shape[1]), fmt.zero_point), zeros))
    return QTensor(fmt, codes, scales, zeros)


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
