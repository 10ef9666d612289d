"""What a calibration is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..families.norms import Fold, Passage, reads
from ..schemes.scheme import StorageSpec

Kind = Literal["gptq", "awq", "smooth", "smooth+gptq", "scales"]
BATCH_TOKENS = 8192  # tokens that pass a layer at once: bounds the memory of its intermediate results


@dataclass(frozen=True)
class Method:
    """What is done with what is seen; everything here can change a byte of the output.

    Attributes:
        kind: "gptq" solves weights by error feedback, "awq" moves scales of channels from norms into weights, "scales"
            only measures activations, "smooth" moves such scales for weights and activations together, also from
            Linears into what reads them, "smooth+gptq" solves by error feedback after that.
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

    @property
    def feeds_back(self) -> bool:
        """Whether weights are solved by error feedback."""
        return self.kind in {"gptq", "smooth+gptq"}

    @property
    def moves(self) -> bool:
        """Whether scales of channels are moved."""
        return self.kind not in {"gptq", "scales"}

    @property
    def smooths(self) -> bool:
        """Whether that is done for activations, too."""
        return self.kind.startswith("smooth")


@dataclass(frozen=True)
class CalibrationTargets:
    """What the plan needs to know.

    Attributes:
        targets: Module -> how its weight will be stored.
        inputs: Modules that get a static activation scale.
        copied: Tensors that are copied unless something is moved into them, with their types.
        folds: Norms that scales can be moved from.
        passages: Linears that they can be moved from.
        head_size: Channels of an attention head, where `passages` needs it.
    """

    targets: Mapping[str, StorageSpec]
    inputs: frozenset[str]
    copied: Mapping[str, torch.dtype] = field(default_factory=dict)
    folds: tuple[Fold, ...] = ()
    passages: tuple[Passage, ...] = ()
    head_size: int = 0

    def needed(self, method: Method) -> set[str]:
        """Modules that a calibration by `method` is for."""
        if method.moves and not method.feeds_back:
            return {module for module in self.targets if any(reads(module, fold) for fold in self.folds)}
        return set(self.inputs) if method.kind == "scales" else set(self.targets)
