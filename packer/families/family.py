"""What a family of models says about its tensors: roles, experts, what is merged, cut and fed by which norm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .experts import ExpertsOrder, ExpertSpellings
from .norms import Fold, Passage
from .parallel import MERGED, MergedLinear, ParallelAxes
from .roles import COMMON, Role, Rule, unwrapped


@dataclass(frozen=True)
class ModelFamily:
    """The names of one family; the first rule that matches decides.

    Attributes:
        id: Name of the family.
        model_types: `model_type` values in config.json (or in its text_config) that belong to it.
        rules: Rules of this family, asked before those that all families share.
        experts_order: Order of the rows of a stacked gate_up tensor; None where nothing is known.
        experts: How the matrices of its experts are called.
        merged: Linears that engines load as one.
        folds: `model_type` -> the norms of its layers and what reads them, for the models where that is known.
        passages: `model_type` -> Linears whose outputs another one reads channel by channel, where that is known.
        gate: What its experts compute between their products, where that is not the activation that config.json names.
        axes: How its Linears are cut for tensor-parallel runs.
        transposed: Ends of the paths of Linears that are stored [in, out], as `Conv1D` of transformers is.
        tied: Paths of further modules that use the embedding's matrix where embeddings are tied.
        head: Path of the output head, whose matrix is the embedding's where embeddings are tied; empty if other
            modules stand between the two.
    """

    id: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    experts_order: ExpertsOrder | None = "gate-up"
    experts: ExpertSpellings = ExpertSpellings()
    merged: tuple[MergedLinear, ...] = MERGED
    axes: ParallelAxes = ParallelAxes()
    gate: str = ""
    folds: Mapping[str, tuple[Fold, ...]] = field(default_factory=dict)
    passages: Mapping[str, tuple[Passage, ...]] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    head: str = "lm_head"

    def stores_transposed(self, module: str) -> bool:
        """Whether the values of this Linear are stored [in, out]; codes of any encoding are [out, in] everywhere."""
        return module.endswith(tuple(f".{tail}" for tail in self.transposed))

    def role(self, module: str) -> Role:
        """The role of a module (a tensor name without its last part, or the name of a bare parameter)."""
        path = unwrapped(module)
        rules = (*self.rules, *COMMON)
        role: Role = next((rule.role for rule in rules if re.search(rule.pattern, path)), "other")
        return "expert" if role in {"linear", "other"} and self.experts.find(path) else role
