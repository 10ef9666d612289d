"""Which weights of a decoder layer read the output of which norm; families say which of their models have it so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


def reads(module: str, fold: Fold) -> bool:
    """Whether the module of this path reads the norm of `fold` in its layer."""
    inside = _inside(module)
    expert = _SPELLINGS.find(inside) if EXPERTS in fold.readers else None
    is_fed = expert is not None and expert.container == EXPERTS and _SPELLINGS.projections[expert.name] != "down"
    return inside in fold.readers or is_fed


def in_folds(tensor: str, folds: Iterable[Fold]) -> bool:
    """Whether the tensor is the weight of a norm of `folds`, or of something that reads one."""
    module = tensor.removesuffix(".weight")
    return any(_inside(module) == fold.norm or reads(module, fold) for fold in folds)


def _inside(module: str) -> str:
    """The part of a path that is inside a decoder layer; empty if it is in none."""
    layer = LAYER.match(module)
    return layer[2] if layer else ""
