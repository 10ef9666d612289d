"""What the tensors of the output are called."""

from __future__ import annotations

import re
from dataclasses import dataclass

INVERTED = re.compile(r"\.experts\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(\d+)(?=\.|$)")


def canonical(name: str) -> str:
    """One order for the two spellings of an expert's name: `experts.gate_proj.7` -> `experts.7.gate_proj`."""
    return INVERTED.sub(r".experts.\2.\1", name)


@dataclass(frozen=True)
class Naming:
    """Source name -> output name: the canonical one; in a draft model the MTP layer becomes layer 0.

    Attributes:
        draft_layer: Prefix of the MTP layer (`model.layers.61.`) of which a draft model is made; empty otherwise.
    """

    draft_layer: str = ""

    def __call__(self, name: str) -> str:
        """The output name of a tensor or a module."""
        name = canonical(name)
        if self.draft_layer and name.startswith(self.draft_layer):
            return "model.layers.0." + name.removeprefix(self.draft_layer)
        return name
