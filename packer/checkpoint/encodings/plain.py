"""16- and 32-bit weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.formats import BF16, WeightFormat
from tilewright.kernels.tensors import QTensor, Reject

from ..declared import QuantMethod
from ..encoding import ACTIVATION_SUFFIXES, Decoder, StoredWeight, TensorGroup, TransposedDecoder

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class PlainDecoder(Decoder):
    """The tensor holds the values themselves."""

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        return tensors[0][rows] if tensors[0].dtype != torch.float64 else tensors[0][rows].to(torch.float32)

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`."""
        return QTensor(fmt, tensors[0]) if tensors[0].dtype == fmt.code_dtype else None

    def transposed(self) -> Decoder:
        """See `Decoder.transposed`."""
        return TransposedDecoder(self)


@dataclass(frozen=True)
class Plain:
    """`weight` [N, K] or a stack [E, A, B], in a floating type of 16 bits or more."""

    id: str = "plain"
    suffixes: tuple[str, ...] = ("weight",)
    methods: tuple[QuantMethod, ...] = ()

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        spec = group.specs.get("weight")
        if spec is None or not group.is_matrix() or spec.dtype not in NAMES:
            return None
        partners = set(group.specs) - {"weight", *ACTIVATION_SUFFIXES}
        scales = sorted(suffix for suffix in partners if suffix.startswith("weight_") or group.declared)
        if scales:
            return group.reject(
                f"is {NAMES[spec.dtype]}, yet `{group.names[scales[0]]}` claims that it is quantized",
                "the checkpoint mixes two models or was cast by a broken tool; fetch it again",
            )
        return StoredWeight(
            group.module,
            (group.names["weight"],),
            tuple(name for suffix, name in group.names.items() if suffix in ACTIVATION_SUFFIXES),
            spec.shape,
            NAMES[spec.dtype],
            PlainDecoder(),
            stored_format=BF16.id if spec.dtype == torch.bfloat16 else "",
            rounds_to=BF16.id if spec.dtype == torch.float16 else "",
        )


PLAIN = Plain()
