"""What a calibration is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..families.norms import Fold, reads
from ..schemes.scheme import StorageSpec

Kind = Literal["gptq", "awq", "scales"]
BATCH_TOKENS = 8192  # tokens that pass a layer at once: bounds the memory of its intermediate results


@dataclass(frozen=True)
class Method:
    """What is done with what is seen; everything here can change a byte of the output.

    Attributes:
        kind: "gptq" solves weights by error feedback, "awq" moves scales of channels from norms into weights, "scales"
            only measures activations.
        inner: Id of the solver that chooses scales of weights.
        act_order: See `ErrorFeedback.act_order`.
        percentile: Share of the elements of an activation that its static scale covers, in percent.
        windows: Windows of the text, evenly spaced.
        window: Tokens in each.
    """

    kind: Kind
    inner: str = "mse"
    act_order: bool = True
    percentile: float = 100.0
    windows: int = 256
    window: int = 128


@dataclass(frozen=True)
class CalibrationTargets:
    """What the plan needs to know.

    Attributes:
        targets: Module -> how its weight will be stored.
        inputs: Modules that get a static activation scale.
        copied: Tensors that are copied unless something is moved into them, with their types.
        folds: Norms that scales can be moved from, for "awq".
    """

    targets: Mapping[str, StorageSpec]
    inputs: frozenset[str]
    copied: Mapping[str, torch.dtype] = field(default_factory=dict)
    folds: tuple[Fold, ...] = ()

    def needed(self, method: Method) -> set[str]:
        """Modules that a calibration by `method` is for."""
        if method.kind == "awq":
            return {module for module in self.targets if any(reads(module, fold) for fold in self.folds)}
        return set(self.inputs) if method.kind == "scales" else set(self.targets)
