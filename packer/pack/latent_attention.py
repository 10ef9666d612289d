"""Absorbed latent attention: `kv_b_proj` split by head into the matrices `w_kc` and `w_vc`.

`kv_b_proj` [heads * (nope + value), rank] turns the cached latents into keys and values of every head. Where queries
are brought into the latent space instead, none of them are made: scores are `(q_nope W_k) latent^T` and results are
`(p latent) W_v^T`. Those two products take, for each head h with the rows `W = kv_b_proj[h * (nope + value) :]`,

    w_kc[h] = W[:nope]^T               [rank, nope]
    w_vc[h] = W[nope : nope + value]   [value, rank]

which `ops.bmm` multiplies by. Block FP8 keeps its codes and scales where each head's rows lie in blocks of their own or
inside one; all else is dequantized and rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.kernels.formats import BF16, WeightFormat
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.tensors import QTensor, Reject

from ..checkpoint.matrices import Matrix
from ..families.config import LATENT_SIZES, text_config
from ..plan import Step
from .sharding import RankSlice
from .steps import read_codes


@dataclass(frozen=True)
class Heads:
    """Sizes of the heads that one rank holds.

    Attributes:
        count: Number of heads.
        nope: Size of the part of a key that has no position.
        value: Size of a value.
        rank: Size of a latent.
    """

    count: int
    nope: int
    value: int
    rank: int

    def format(self, fmt: WeightFormat) -> WeightFormat:
        """`fmt` if its blocks are square and each part of a head is whole blocks or inside one; else bf16."""
        unit = fmt.block_n
        square = unit > 1 and unit == fmt.block_k
        fits = square and self.nope == self.value and (self.nope % unit == 0 or unit % self.nope == 0)
        return fmt if fits else BF16

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Logical shapes of the two stacks."""
        return {"w_kc": (self.count, self.rank, self.nope), "w_vc": (self.count, self.value, self.rank)}


def heads_of(weight: Matrix, config: Mapping[str, Any], ranks: int) -> Heads | Reject:
    """The heads of a `kv_b_proj` of which each of `ranks` ranks holds an equal share."""
    text = text_config(config)
    sizes = [text.get(key) for key in LATENT_SIZES]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return Reject(weight.module, f"config.json lacks one of {', '.join(LATENT_SIZES)}")
    heads, nope, value, rank = (int(size) for size in sizes if size)
    if weight.shape != (heads * (nope + value), rank):
        reason = f"is {list(weight.shape)}, config.json says {heads} heads of {nope} + {value} rows and {rank} columns"
        return Reject(weight.module, reason)
    return Heads(heads // ranks, nope, value, rank)


@dataclass(frozen=True)
class AbsorbStep(Step):
    """Makes `w_kc` and `w_vc` of one `kv_b_proj`.

    Attributes:
        prefix: Path of the attention.
        matrix: The matrix.
        source: Format of its codes.
        rank_slice: Which share of it this rank holds.
        heads: The heads in that share.
        layout: Layout of the two.
    """

    prefix: str
    matrix: Matrix
    source: WeightFormat
    rank_slice: RankSlice
    heads: Heads
    layout: Layout

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The packed tensors by name."""
        whole = read_codes(self.matrix, sources, self.source)
        before, _ = self.rank_slice.leading(whole.format, *whole.shape)
        q = self.rank_slice.take(whole, (before, 0))
        if rotation := self.matrix.stored.rotation:  # nothing rotates what these two are multiplied by
            q = QTensor(BF16, rotation.of(q.dequantize()).to(torch.bfloat16))
        keys, values = split_heads(q, self.heads, before)
        named = {f"{self.prefix}.w_kc.{suffix}": tensor for suffix, tensor in self.layout.pack(keys).items()}
        return named | {f"{self.prefix}.w_vc.{suffix}": tensor for suffix, tensor in self.layout.pack(values).items()}


def split_heads(q: QTensor, heads: Heads, before: int = 0) -> tuple[QTensor, QTensor]:
    """`w_kc` [heads, rank, nope] and `w_vc` [heads, value, rank] of a `kv_b_proj` [heads * (nope + value), rank].

    Args:
        q: The matrix.
        heads: Sizes of the heads.
        before: Rows of `q` before the first head.
    """
    fmt = heads.format(q.format)
    if not fmt.has_scales:
        rows = q.dequantize()[before:].to(torch.bfloat16).reshape(heads.count, heads.nope + heads.value, heads.rank)
        keys, values = rows.split([heads.nope, heads.value], 1)
        return QTensor(fmt, keys.transpose(1, 2).contiguous()), QTensor(fmt, values.contiguous())
    assert q.scales is not None
    codes = q.codes[before:].view(torch.uint8).reshape(heads.count, heads.nope + heads.value, heads.rank)
    keys, values = codes.split([heads.nope, heads.value], 1)
    starts = before + torch.arange(heads.count) * (heads.nope + heads.value)
    steps = torch.arange(-(-heads.nope // fmt.block_n)) * fmt.block_n
    key_rows = (starts[:, None] + steps) // fmt.block_n  # [heads, blocks of a head]
    value_rows = (starts[:, None] + heads.nope + steps) // fmt.block_n
    return (
        QTensor(
            fmt,
            keys.transpose(1, 2).contiguous().view(fmt.code_dtype),
            q.scales[key_rows].transpose(1, 2).contiguous(),
        ),
        QTensor(fmt, values.contiguous().view(fmt.code_dtype), q.scales[value_rows]),
    )
