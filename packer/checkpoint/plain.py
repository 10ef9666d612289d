"""16- and 32-bit weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.tensors import QTensor, Reject

from .base import Group, SourceWeight

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class PlainReader:
    """The tensor holds the values themselves."""

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Reader.rows`."""
        return tensors[0][rows] if tensors[0].dtype != torch.float64 else tensors[0][rows].to(torch.float32)

    def raw(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Reader.raw`."""
        return tensors[0][rows]

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Reader.codes`."""
        return QTensor(fmt, tensors[0]) if tensors[0].dtype == fmt.code_dtype else None


def detect(group: Group) -> SourceWeight | Reject | None:
    """A plain weight, or None if `group` is something else."""
    spec = group.specs["weight"]
    if spec.dtype not in NAMES:
        return None
    scales = sorted(suffix for suffix in group.specs if suffix.startswith("weight_"))
    if scales:
        return group.reject(
            f"is {NAMES[spec.dtype]}, yet `{group.names[scales[0]]}` claims that it is quantized",
            "the checkpoint mixes two models or was cast by a broken tool; fetch it again",
        )
    companions = tuple(name for suffix, name in group.names.items() if suffix != "weight")
    keeps = ("bf16",) if spec.dtype == torch.bfloat16 else ()
    return SourceWeight(group.module, (group.weight,), companions, spec.shape, NAMES[spec.dtype], PlainReader(), keeps)
