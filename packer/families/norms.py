"""Through what scales of channels can be moved in a decoder layer; families say which of their models have it so."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .experts import ExpertSpellings
from .layers import LAYER

EXPERTS = "mlp.experts"
_SPELLINGS = ExpertSpellings()


@dataclass(frozen=True)
class Fold:
    """A norm whose weight can take up scales of channels, and everything that reads what it gives.

    Attributes:
        norm: Path of the norm inside a layer; it multiplies by its weight.
        readers: Paths of the modules that read its output, those that a layer may lack included; `mlp.experts` stands
            for the gate and up projections of every expert.
    """

    norm: str
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """A Linear whose outputs reach the input of another one channel by channel, times what does not depend on them.

    Attributes:
        writer: Path of the first inside a layer, `*` in place of the number of an expert.
        reader: Path of the second.
        by_head: The outputs are values of attention: a channel of a key-value head reaches all heads that share it.
    """

    writer: str
    reader: str
    by_head: bool = False

    def pairs(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Writer and reader wherever both are among `names`, which are paths of modules inside a layer."""
        known = set(names)
        pattern = re.compile(re.escape(self.writer).replace(r"\*", r"(\d+)"))
        found = []
        for writer in sorted(known):
            if match := pattern.fullmatch(writer):
                reader = self.reader.replace("*", match[1]) if "*" in self.reader else self.reader
                found += [(writer, reader)] if reader in known else []
        return found


_MLP = Fold(
    "post_attention_layernorm",
    (
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.gate",
        "mlp.shared_expert_gate",
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        EXPERTS,
    ),
)
PLAIN = (Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")), _MLP)
LATENT = (
    Fold("input_layernorm", ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")),
    Fold("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)),
    Fold("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
    _MLP,
)


def of_rows(columns: torch.Tensor, repeats: int, head: int) -> torch.Tensor:
    """Factors [N] of the rows of a Linear, from those [repeats * N] of the columns that read each row `repeats` times.

    Heads of `head` channels that share a key-value head follow one another.
    """
    return columns if repeats == 1 else columns.view(-1, repeats, head)[:, 0].reshape(-1)


def of_columns(rows: torch.Tensor, repeats: int, head: int) -> torch.Tensor:
    """The inverse of `of_rows`."""
    return rows if repeats == 1 else rows.view(-1, 1, head).expand(-1, repeats, head).reshape(-1)


VALUES = Passage("self_attn.v_proj", "self_attn.o_proj", by_head=True)
GATED = tuple(
    Passage(f"{mlp}.up_proj", f"{mlp}.down_proj")
    for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts", f"{EXPERTS}.*")
)


def reads(module: str, fold: Fold) -> bool:
    """Whether the module of this path reads the norm of `fold` in its layer."""
    inside = _inside(module)
    expert = _SPELLINGS.find(inside) if EXPERTS in fold.readers else None
    is_fed = expert is not None and expert.container == EXPERTS and _SPELLINGS.projections[expert.name] != "down"
    return inside in fold.readers or is_fed


def in_folds(tensor: str, folds: Iterable[Fold], passages: Iterable[Passage] = ()) -> bool:
    """Whether the tensor is the weight of a norm of `folds` or of something that reads one, or belongs to a passage."""
    module = tensor.removesuffix(".weight")
    linear = _inside(module.removesuffix(".bias"))
    return any(_inside(module) == fold.norm or reads(module, fold) for fold in folds) or any(
        linear in {passage.writer, passage.reader} for passage in passages
    )


def _inside(module: str) -> str:
    """The part of a path that is inside a decoder layer; empty if it is in none."""
    layer = LAYER.match(module)
    return layer[2] if layer else ""
