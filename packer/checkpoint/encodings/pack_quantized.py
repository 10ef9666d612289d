"""compressed-tensors `pack-quantized`: integer codes of 2 to 8 bits, packed into words along K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import INT4_BY_GROUP
from tilewright.kernels.tensors import Reject

from ..declared import DeclaredNumbers, QuantMethod
from ..encoding import StoredWeight, TensorGroup
from .affine import AffineDecoder, int4_format, layout_id
from .bits import along_columns, along_rows, packed_words
from .compressed_tensors import COMPRESSED_TENSORS
from .int4_groups import int4_weight

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PackedDecoder(AffineDecoder):
    """Tensors weight_packed int32 [N, K * bits / 32], weight_scale [N, G], and those that `extras` names.

    Attributes:
        extras: Of `weight_zero_point` int32 [N * bits / 32, G], `weight_g_idx` [K] and `weight_shape` [2], those that
            are there, in order.
        n: Rows of the matrix.
    """

    extras: tuple[str, ...] = ()
    n: int = 0

    def _extra(self, tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor | None:
        return tensors[2 + self.extras.index(name)] if name in self.extras else None

    def unpack(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.unpack`.

        Raises:
            SchemeError: `weight_shape` says that the words hold a matrix of another shape.
        """
        shape = self._extra(tensors, "weight_shape")
        if shape is not None and shape.tolist() != [self.n, self.k]:
            reason = f"`weight_shape` says {shape.tolist()}, its words and scales say {[self.n, self.k]}"
            raise SchemeError(reason, hint="dequantize it with compressed-tensors first")
        return along_rows(tensors[0][rows], self.bits, self.k)

    def scales(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `AffineDecoder.scales`."""
        scales = tensors[1] if tensors[1].numel() > 1 else tensors[1].reshape(1, 1).expand(self.n, 1)
        return scales.reshape(self.n, -1)[rows]

    def zeros(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor | None:
        """See `AffineDecoder.zeros`."""
        zeros = self._extra(tensors, "weight_zero_point")
        return None if zeros is None else along_columns(zeros, self.bits, self.n)[rows]

    def groups(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `AffineDecoder.groups`."""
        order = self._extra(tensors, "weight_g_idx")
        if order is None:
            return super().groups(tensors)
        index, count = order.to(torch.int64), tensors[1].shape[-1]
        if bool(((index < 0) | (index >= count)).any()):
            raise SchemeError(f"weight_g_idx names groups outside of 0 to {count - 1}", hint="it is damaged")
        return index

    def height(self, tensors: Sequence[torch.Tensor]) -> int:
        """See `AffineDecoder.height`."""
        return self.n


@dataclass(frozen=True)
class PackQuantized:
    """`weight_packed` beside `weight_scale`, `weight_shape`, and with zero points or an order of activations, those."""

    id: str = "pack-quantized"
    suffixes: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    methods: tuple[QuantMethod, ...] = (COMPRESSED_TENSORS,)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        packed, declared = group.specs.get("weight_packed"), group.declared
        if packed is None or (declared and declared.packing != self.id) or not group.is_matrix("weight_packed"):
            return None
        if declared is None:
            return group.undeclared("codes of compressed-tensors", "weight_packed")
        if missing := group.missing("weight_packed", "weight_scale"):
            return missing
        if packed.dtype != torch.int32:
            return group.reject(f"is {packed.dtype}, pack-quantized weights are int32", suffix="weight_packed")
        if declared.kind != "int" or not 1 < declared.bits <= 8 or declared.block is None:
            return group.reject(
                f"is declared as {declared.kind}{declared.bits}, not as integers", suffix="weight_packed"
            )
        is_plain = declared.symmetric and declared.bits == 4 and declared.block[1] in INT4_BY_GROUP
        extra = {"weight_zero_point", "weight_g_idx"} & set(group.specs)
        if is_plain and not extra and not declared.by_activation:
            k = packed.shape[-1] * 8
            if (*packed.shape[:-1], k // declared.block[1]) != group.specs["weight_scale"].shape:
                reason = f"has scales {list(group.specs['weight_scale'].shape)}, no groups of {declared.block[1]}"
                return group.reject(reason, suffix="weight_packed")
            return int4_weight(group, "weight_packed", "weight_scale", k, signed=False)
        return _general(group, declared)


def _general(group: TensorGroup, declared: DeclaredNumbers) -> StoredWeight | Reject:
    """Any number of bits, with or without zero points and an order of activations."""
    assert declared.block
    if len(group.specs["weight_packed"].shape) != 2:
        return group.reject("is a stack of experts in other than plain int4, which is not read", suffix="weight_packed")
    n, words = group.specs["weight_packed"].shape
    k = words * 32 // declared.bits
    if declared.block[1]:
        k = group.specs["weight_scale"].shape[-1] * declared.block[1]
    elif 32 % declared.bits or words * 32 % declared.bits:
        return group.reject(
            "may have several widths: its words do not tell how many codes they hold", suffix="weight_packed"
        )
    groups = k // declared.block[1] if declared.block[1] else 1
    scale_shapes = {(1, 0): {(n, 1)}, (0, 0): {(), (1,), (1, 1)}}.get(declared.block, {(n, groups)})
    expected = {
        "weight_packed": (torch.int32, (n, packed_words(k, declared.bits))),
        "weight_scale": (FLOATS, scale_shapes),
        "weight_zero_point": (torch.int32, (packed_words(n, declared.bits), groups)),
        "weight_g_idx": ((torch.int32, torch.int64), (k,)),
        "weight_shape": ((torch.int32, torch.int64), (2,)),
    }
    extras = ("weight_zero_point",) * (not declared.symmetric)
    if "weight_g_idx" in group.specs and not declared.by_activation:
        reason = "has an order of activations, yet the config does not say so (`actorder`)"
        return group.reject(reason, suffix="weight_packed")
    if declared.by_activation:
        extras += ("weight_g_idx",)
    if "weight_shape" in group.specs:
        extras += ("weight_shape",)
    if declared.symmetric and "weight_zero_point" in group.specs:
        reason = "has zero points, yet the config says that it is symmetric"
        return group.reject(reason, suffix="weight_packed")
    if "weight_g_idx" in extras and declared.block[1] == 0:
        return group.reject("has an order of activations, but no groups", suffix="weight_packed")
    if missing := group.missing(*extras):
        return missing
    used = {suffix: expected[suffix] for suffix in ("weight_packed", "weight_scale", *extras)}
    if wrong := group.mismatch(used, f"{declared.bits} bits in groups of {declared.block[1] or k}"):
        return wrong
    decoder = PackedDecoder(declared.bits, k, declared.block[1], 1 << (declared.bits - 1), extras=extras, n=n)
    kind = f"int{declared.bits} group {declared.block[1] or 'K'}"
    return StoredWeight(
        group.module,
        tuple(group.names[suffix] for suffix in used),
        group.others(*used),
        (n, k),
        kind,
        decoder,
        int4_format(declared.bits, declared.block[1], (n, k), declared.by_activation) if not declared.symmetric else "",
        layout=layout_id("pack-quantized-asym", group.specs["weight_scale"].dtype),
        requantized=True,
    )


PACK_QUANTIZED = PackQuantized()
