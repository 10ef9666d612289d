"""What a family of models says about its tensors: roles, experts, what is merged, cut and fed by which norm."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .experts import ExpertsOrder, ExpertSpellings
from .parallel import MERGED, MergedLinear, ParallelAxes
from .roles import COMMON, Role, Rule

WRAPPER = re.compile(
    r"^(?:model\.language_model\.model|model\.language_model|language_model\.model|model\.text_model)\."
)


def unwrapped(module: str) -> str:
    """The path that the module has in the text-only model: `model.language_model.layers.0` -> `model.layers.0`."""
    module = WRAPPER.sub("model.", module)
    return module.removeprefix("language_model.")


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
        gate: What its experts compute between their products, where that is not the activation that config.json names.
        axes: How its Linears are cut for tensor-parallel runs.
    """

    id: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    experts_order: ExpertsOrder | None = "gate-up"
    experts: ExpertSpellings = ExpertSpellings()
    merged: tuple[MergedLinear, ...] = MERGED
    axes: ParallelAxes = ParallelAxes()
    gate: str = ""

    def role(self, module: str) -> Role:
        """The role of a module (a tensor name without its last part, or the name of a bare parameter)."""
        path = unwrapped(module)
        rules = (*self.rules, *COMMON)
        role: Role = next((rule.role for rule in rules if re.search(rule.pattern, path)), "other")
        return "expert" if role in {"linear", "other"} and self.experts.find(path) else role
