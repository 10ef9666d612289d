"""What int4 weights lose when they are quantized to int4 a second time, measured on the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..checkpoint import detect_weights
from ..checkpoint.encoding import StoredWeight
from ..checkpoint.files import Checkpoint
from ..families import family_of
from ..plan import Source

SAMPLES = 32


@dataclass(frozen=True)
class Loss:
    """Relative Frobenius error of the output against the source's own int4 values.

    Attributes:
        mean: Mean over the matrices measured.
        largest: The largest one.
        worst: Its module.
        measured: How many matrices were measured, evenly spaced.
        count: How many were quantized a second time.
    """

    mean: float
    largest: float
    worst: str
    measured: int
    count: int

    def __str__(self) -> str:
        return (
            f"int4 quantized a second time: relative error {self.mean:.4f} on average, {self.largest:.4f} at most "
            f"({self.worst}), measured on {self.measured} of {self.count} matrices"
        )


def measure(source: Checkpoint, output: Checkpoint) -> Loss | None:
    """Compare matrices that are int4 in both checkpoints, but in groups of different sizes.

    Args:
        source: The source; its shards are still there.
        output: The finished output.

    Returns:
        The loss, or None if no matrix was quantized a second time.
    """
    before, after = _int4(source), _int4(output)
    again = [
        module for module, weight in before.items() if module in after and weight.encoding != after[module].encoding
    ]
    if not again:
        return None
    chosen = again[:: -(-len(again) // SAMPLES)]
    errors = {}
    for module in chosen:
        old, new = _values(source, before[module]), _values(output, after[module])
        errors[module] = float((new - old).norm() / old.norm().clamp_min(torch.finfo(torch.float32).tiny))
    worst = max(errors, key=lambda module: errors[module])
    return Loss(sum(errors.values()) / len(errors), errors[worst], worst, len(errors), len(again))


def _int4(checkpoint: Checkpoint) -> Mapping[str, StoredWeight]:
    canonical = family_of(checkpoint.config).experts.canonical
    specs = {name: checkpoint.spec(name) for name in checkpoint.files}
    inventory = detect_weights(specs, checkpoint.config, checkpoint.details)
    return {
        canonical(weight.module): weight for weight in inventory.weights if weight.few_bits and len(weight.shape) == 2
    }


def _values(checkpoint: Checkpoint, weight: StoredWeight) -> torch.Tensor:
    sources = [Source(name) for name in weight.tensors]
    values = weight.decoder.rows([checkpoint.tensor(source) for source in sources], slice(0, weight.shape[0], 1))
    for source in sources:
        checkpoint.forget(source)
    return values
