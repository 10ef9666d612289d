"""Checkpoint layouts of int4 codes with zero points: GPTQ, AWQ, and compressed-tensors without symmetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import LayoutError
from ..formats import INT4_BY_GROUP, WeightFormat
from ..ops.convert import join_nibbles, split_nibbles
from ..tensors import QTensor, Reject, TensorSpec
from .base import check_tensors

Packing = Literal["gptq", "gptq_v2", "awq", "compressed-tensors"]
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # column that lies in nibble i of a word
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble in which column i lies


@dataclass(frozen=True)
class Int4ZeroPoints:
    """Codes 0..15 and zero points z, value = (code - z) * scale; G = K / group, words of eight nibbles, lowest first.

    GPTQ: `qweight` int32 [K / 8, N], eight codes of a column of K in a word; `qzeros` int32 [G, N / 8], z - 1 in the
    first version and z in the second; `scales` [G, N]; `g_idx` int32 [K], k // group, where files have it.
    AWQ: `qweight` int32 [K, N / 8] and `qzeros` int32 [G, N / 8], the columns of N in a word in the order 0 2 4 6 1 3 5
    7; `scales` [G, N].
    compressed-tensors: `weight_packed` int32 [N, K / 8], `weight_zero_point` int32 [N / 8, G], `weight_scale` [N, G],
    `weight_shape` int64 [2].

    Attributes:
        id: Stable name of the layout.
        packing: Which of the four.
        scale_dtype: Type of the scales.
        has_order: GPTQ files hold a `g_idx`.
        version: Version of the byte formula.
    """

    id: str
    packing: Packing
    scale_dtype: torch.dtype
    has_order: bool = False
    version: int = 1

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight, or None if it can."""
        if fmt not in INT4_BY_GROUP.values():
            return Reject(self.id, f"holds int4 codes, not {fmt.id}")
        if len(shape) != 2 or parts != 1:
            return Reject(self.id, f"holds single matrices, not {parts} parts of shape {list(shape)}")
        if shape[0] % 8 or shape[1] % fmt.block_k:
            return Reject(self.id, f"{list(shape)} are no whole words of 8 rows and groups of {fmt.block_k} columns")
        return None

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of every tensor that `pack` gives."""
        n, k = shape
        groups = k // fmt.block_k
        if self.packing == "compressed-tensors":
            return {
                "weight_packed": TensorSpec(torch.int32, (n, k // 8)),
                "weight_scale": TensorSpec(self.scale_dtype, (n, groups)),
                "weight_zero_point": TensorSpec(torch.int32, (n // 8, groups)),
                "weight_shape": TensorSpec(torch.int64, (2,)),
            }
        weight = (k, n // 8) if self.packing == "awq" else (k // 8, n)
        specs = {
            "qweight": TensorSpec(torch.int32, weight),
            "qzeros": TensorSpec(torch.int32, (groups, n // 8)),
            "scales": TensorSpec(self.scale_dtype, (groups, n)),
        }
        return specs | ({"g_idx": TensorSpec(torch.int32, (k,))} if self.has_order else {})

    @property
    def _offset(self) -> int:
        return 1 if self.packing == "gptq" else 0

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The named tensors.

        Raises:
            LayoutError: A scale is no number of the layout's type, or a zero point of 0 cannot be stored as -1.
        """
        assert q.scales is not None
        scales = q.scales.to(self.scale_dtype)
        if not torch.equal(scales.to(torch.float32), q.scales):
            raise LayoutError(f"layout {self.id}: stores {self.scale_dtype} scales, those of this weight are no such")
        zeros = torch.full_like(q.scales, q.format.zero_point, dtype=torch.uint8) if q.zeros is None else q.zeros
        if self._offset and bool((zeros == 0).any()):
            raise LayoutError(f"layout {self.id}: a zero point of 0 cannot be stored one lower")
        if self.packing == "compressed-tensors":
            return {
                "weight_packed": _words(q.codes),
                "weight_scale": scales.contiguous(),
                "weight_zero_point": _words(zeros.T).T.contiguous(),
                "weight_shape": torch.tensor(q.shape),
            }
        stored = zeros.T - self._offset
        tensors = {"scales": scales.T.contiguous()}
        if self.packing == "awq":
            tensors["qweight"] = _words(_by_place(q.codes.T, AWQ_PLACES))
            tensors["qzeros"] = _words(_by_place(stored, AWQ_PLACES))
        else:
            tensors |= {"qweight": _words(q.codes).T.contiguous(), "qzeros": _words(stored)}
        if self.has_order:
            tensors["g_idx"] = (torch.arange(q.shape[1]) // q.format.block_k).to(torch.int32)
        return tensors

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`; zero points that are all 8 are given as None."""
        check_tensors(f"layout {self.id}", tensors, self.specs(fmt, shape, parts))
        if self.packing == "compressed-tensors":
            codes, zeros = _nibbles(tensors["weight_packed"]), _nibbles(tensors["weight_zero_point"].T).T
            scales = tensors["weight_scale"]
        elif self.packing == "awq":
            codes, zeros = (_by_place(_nibbles(tensors[name]), AWQ_COLUMNS).T for name in ("qweight", "qzeros"))
            scales = tensors["scales"].T
        else:
            codes, zeros = _nibbles(tensors["qweight"].T), _nibbles(tensors["qzeros"]).T + self._offset
            scales = tensors["scales"].T
        is_middle = bool((zeros == fmt.zero_point).all())
        values = scales.to(torch.float32).contiguous()
        return QTensor(fmt, codes.contiguous(), values, None if is_middle else zeros.contiguous())


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Eight codes of a row in each word: uint8 [R, C] -> int32 [R, C / 8]."""
    return join_nibbles(codes.contiguous()).view(torch.int32)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_words`."""
    return split_nibbles(words.contiguous().view(torch.uint8))


def _by_place(codes: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """The columns of every eight in another order: column `places[i]` comes i-th."""
    rows, columns = codes.shape
    return codes.reshape(rows, columns // 8, 8)[..., list(places)].reshape(rows, columns)


_SCALES = {"": torch.float16, "-bf16": torch.bfloat16, "-fp32": torch.float32}
ZERO_POINTS = (
    *(
        Int4ZeroPoints(f"{packing.replace('_', '-')}-int4{'-order' * order}{ending}", packing, dtype, order)
        for packing in ("gptq", "gptq_v2")
        for order in (False, True)
        for ending, dtype in _SCALES.items()
    ),
    *(Int4ZeroPoints(f"awq-int4{ending}", "awq", dtype) for ending, dtype in _SCALES.items()),
    *(Int4ZeroPoints(f"pack-quantized-asym{ending}", "compressed-tensors", t) for ending, t in _SCALES.items()),
)
