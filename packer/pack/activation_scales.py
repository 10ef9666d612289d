"""One static activation scale for all experts of a layer, as engines make it when they load a checkpoint.

Every expert has a scale, but all rows of a layer are quantized once, before each of its two products. So SGLang takes
the largest of the experts that a rank holds. TensorRT-LLM does so for the second product, and for the first takes the
largest of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.packed.module_spec import INPUT_SCALE, ModuleSpec, RankSharding
from tilewright.kernels.tensors import Reject, TensorSpec

from ..plan import Piece, Source, Step, Task
from .groups import ModuleGroup

OF_ALL_RANKS = "gpu-trtllm-w4"  # the layout whose engine does so


@dataclass(frozen=True)
class LargestStep(Step):
    """The largest of scalar tensors.

    Attributes:
        name: Name of the result, fp32 [1].
    """

    name: str

    def run(self, sources: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Name -> largest of the sources, each of one element."""
        return {self.name: torch.stack([source.reshape(()).to(torch.float32) for source in sources]).amax().reshape(1)}


def reduced_scale(group: ModuleGroup, sharding: RankSharding, spec: ModuleSpec | None) -> Task | Reject | None:
    """The task that makes the one activation scale of a stack.

    Args:
        group: The stack.
        sharding: The rank, and how many share the model.
        spec: The packed module made of it; None if it is not packed.

    Returns:
        None where no expert has a scale; a reject where some have one and others do not.
    """
    if spec is None:
        return None
    everywhere = spec.layout.id == OF_ALL_RANKS and group.parts == 2
    numbers = range(len(group.experts)) if everywhere or sharding.ep[1] == 1 else spec.numbers
    weights = [weight for number in numbers for weight in group.experts[number]]
    names = [name for weight in weights for name in weight.stored.companions if name.endswith(f".{INPUT_SCALE}")]
    if not names:
        return None
    if len(names) != len(weights):
        reason = f"{len(weights) - len(names)} of {len(weights)} matrices have no {INPUT_SCALE}, others have one"
        return Reject(group.name, reason, "calibrate again: engines would take 1.0 for those")
    name = f"{group.name}.{INPUT_SCALE}"
    piece = Piece(name, TensorSpec(torch.float32, (1,)))
    return Task(tuple(Source(source) for source in names), (piece,), LargestStep(name))
