"""What the tensors of the output are called."""

from __future__ import annotations

from dataclasses import dataclass

from ..families.experts import ExpertSpellings


@dataclass(frozen=True)
class Naming:
    """Source name -> output name: the canonical one; in a draft model the MTP layer becomes layer 0.

    Attributes:
        experts: How the family calls the matrices of experts.
        draft_layer: Prefix of the MTP layer (`model.layers.61.`) of which a draft model is made; empty otherwise.
    """

    experts: ExpertSpellings = ExpertSpellings()
    draft_layer: str = ""

    def __call__(self, name: str) -> str:
        """The output name of a tensor or a module."""
        return self.of_canonical(self.experts.canonical(name))

    def of_canonical(self, name: str) -> str:
        """The same for a name in which the number of an expert stands where it does in outputs."""
        if self.draft_layer and name.startswith(self.draft_layer):
            return "model.layers.0." + name.removeprefix(self.draft_layer)
        return name

    def input_scale(self, module: str) -> str:
        """The name of the static activation scale of an expert's matrix in the output."""
        return f"{self.experts.short(module)}.input_scale"
