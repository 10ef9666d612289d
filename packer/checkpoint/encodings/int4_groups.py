"""What the encodings of symmetric int4 codes in groups along K share: two codes in a byte, the even column first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import INT4_BY_GROUP, WeightFormat
from tilewright.kernels.ops.convert import scale_codes, split_nibbles
from tilewright.kernels.tensors import QTensor, Reject

from ..encoding import Decoder, StoredWeight, TensorGroup


@dataclass(frozen=True)
class Int4Decoder(Decoder):
    """value[n, k] = (nibble[n, k] - 8) * scale[n, k // group], in fp32; low nibble = even column.

    Attributes:
        group: Columns that share a scale.
        signed: Nibbles are two's complement instead of offset-binary.
    """

    group: int
    signed: bool

    def _codes(self, joined: torch.Tensor) -> torch.Tensor:
        """uint8 codes 0..15 around 8."""
        joined = joined.contiguous().view(torch.uint8)
        return split_nibbles(joined, flip=8 if self.signed else 0)

    def _check_shape(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compare the shape that a third tensor states with that of the codes.

        Raises:
            SchemeError: They differ.
        """
        shape = [tensors[0].shape[0], tensors[1].shape[-1] * self.group]
        if len(tensors) > 2 and tensors[2].tolist() != shape:
            reason = f"`weight_shape` says {tensors[2].tolist()}, its words and scales say {shape}"
            raise SchemeError(reason, hint="dequantize it with compressed-tensors first")

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        self._check_shape(tensors)
        return scale_codes(self._codes(tensors[0][rows]), tensors[1][rows].to(torch.float32), 1, self.group)

    def codes(self, tensors: Sequence[torch.Tensor], fmt: WeightFormat) -> QTensor | None:
        """See `Decoder.codes`."""
        self._check_shape(tensors)
        scales = tensors[1].to(torch.bfloat16) if self.signed else tensors[1]  # engines cast those of W4AFP8 to bf16
        return QTensor(fmt, self._codes(tensors[0]), scales.to(torch.float32))


def int4_weight(group: TensorGroup, codes: str, scale: str, k: int, signed: bool) -> StoredWeight | Reject:
    """The weight whose codes and scales are the tensors of these suffixes.

    Args:
        group: Its tensors.
        codes: Suffix of the codes.
        scale: Suffix of the scales.
        k: Columns of the weight.
        signed: Nibbles are two's complement instead of offset-binary.
    """
    spec, scales = group.specs[codes], group.specs[scale]
    columns = scales.shape[-1] if len(scales.shape) > 1 else 1
    size = k // columns
    if scales.shape != (*spec.shape[:-1], columns) or k % columns or size not in INT4_BY_GROUP:
        return group.reject(
            f"has {k} columns and scales {list(scales.shape)}: groups of {k / columns:g}, known are "
            f"{', '.join(map(str, INT4_BY_GROUP))}",
            suffix=codes,
        )
    stated = [suffix for suffix in ("weight_shape",) if suffix in group.specs and len(spec.shape) == 2]
    return StoredWeight(
        group.module,
        tuple(group.names[suffix] for suffix in (codes, scale, *stated)),
        group.others(codes, scale, *stated),
        (*spec.shape[:-1], k),
        f"int4 group {size}",
        Int4Decoder(size, signed),
        INT4_BY_GROUP[size].id,
        requantized=not signed and scales.dtype != torch.bfloat16,
    )
