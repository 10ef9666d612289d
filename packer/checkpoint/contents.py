"""What a directory holds, seen as logical weights: one matrix per Linear and per expert, whatever bytes it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.rotation import Rotation
from tilewright.kernels.tensors import QTensor


@dataclass(frozen=True)
class LogicalTensor:
    """One logical tensor of a directory, read on demand.

    Attributes:
        name: Its name in a plain checkpoint with one tensor per expert and projection.
        shape: Logical shape.
        format: What its numbers mean, or None for a tensor that is stored as it is, or in an encoding of no format.
        read: Reads it: a `QTensor` [N, K] if it has a format, the tensor itself if it is stored as it is, else the
            values in fp32.
        encoding: Name of the encoding of a quantized weight that fits no format, such as "per-tensor FP8".
        sources: Stored tensors that it lies in, for messages and for giving mapped pages back.
        rotation: What its columns were multiplied by before its codes were made; None: nothing.
        any_scales: It may have zero points, and scales of any type: to be held by what may not, it is rounded anew.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat | None
    read: Callable[[], QTensor | torch.Tensor]
    encoding: str = ""
    sources: tuple[str, ...] = ()
    rotation: Rotation | None = None
    any_scales: bool = False

    def values(self) -> torch.Tensor:
        """The numbers that it stands for, fp32; those of a weight whose input is rotated, as without a rotation."""
        stored = self.read()
        if not isinstance(stored, QTensor):
            return stored.to(torch.float32)
        values = stored.dequantize()
        return self.rotation.of(values) if self.rotation else values


@dataclass(frozen=True)
class Contents:
    """The logical weights of one directory.

    Attributes:
        title: How messages call the directory.
        weights: Name -> weight.
        dropped: Names that the directory leaves out on purpose, with the reason.
        aliases: Name -> the name of the weight that serves for it (a tied head).
        feedback: Codes were chosen by error feedback, so they make up for each other instead of being the nearest.
        smoothed: Scales of channels were moved between its Linears, by powers of two.
        forget: Gives back the memory of a weight that was read from a mapped file.
    """

    title: str
    weights: Mapping[str, LogicalTensor]
    dropped: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    feedback: bool = False
    smoothed: bool = False
    forget: Callable[[LogicalTensor], None] = lambda _: None

    def find(self, name: str) -> LogicalTensor | None:
        """The weight `name`, or the one that it is tied to."""
        return self.weights.get(name) or self.weights.get(self.aliases.get(name, name))
