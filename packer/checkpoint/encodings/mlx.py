"""MLX: codes of 2 to 8 bits in words along K, with a scale and an addend for each group of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.kernels.tensors import Reject

from ..declared import Declared, DeclaredNumbers, Fields, QuantMethod
from ..encoding import Decoder, StoredWeight, TensorGroup
from .bits import along_rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class MlxDecoder(Decoder):
    """value[n, k] = code[n, k] * scale[n, g] + bias[n, g] in fp32, g the group of column k.

    Attributes:
        bits: Bits of a code.
        k: Columns.
        group: Columns that share a scale.
    """

    bits: int
    k: int
    group: int

    def rows(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """See `Decoder.rows`."""
        words, scales, biases = (tensor[rows] for tensor in tensors)
        codes = along_rows(words, self.bits, self.k).to(torch.float32)
        codes.mul_(scales.to(torch.float32).repeat_interleave(self.group, 1))
        return codes.add_(biases.to(torch.float32).repeat_interleave(self.group, 1))


@dataclass(frozen=True)
class MlxMethod:
    """The key `quantization` of config.json: sizes for all modules, and for some of them their own, or false."""

    id: str = "mlx"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        numbers = _numbers(fields)
        apart: dict[str, DeclaredNumbers | None] = {}
        for key in fields.remaining():
            value = fields.take(key)
            if "." not in key or not isinstance(value, bool | dict):
                raise fields.fail(key, "is a key that the reader of this format does not know")
            inner = Fields(value, fields.name(key)) if isinstance(value, dict) else None
            apart[key] = _numbers(inner) if inner else (numbers if value else None)
            if inner:
                inner.close()
        fields.close()
        return lambda module: apart.get(module, numbers)


def _numbers(fields: Fields) -> DeclaredNumbers:
    mode = fields.choose("mode", ("affine",), "affine")
    bits, group = fields.choose("bits", BITS), fields.choose("group_size", GROUPS)
    if not bits or not group:
        raise fields.fail("group_size" if bits else "bits", "is missing")
    return DeclaredNumbers("int", bits, (1, group), False, packing=f"mlx-{mode}")


@dataclass(frozen=True)
class Mlx:
    """`weight` uint32 [N, K * bits / 32] beside `scales` and `biases` [N, K / group]."""

    id: str = "mlx"
    suffixes: tuple[str, ...] = ("weight", "scales", "biases")
    methods: tuple[QuantMethod, ...] = (MlxMethod(),)

    def detect(self, group: TensorGroup) -> StoredWeight | Reject | None:
        """See `Encoding.detect`."""
        spec, declared = group.specs.get("weight"), group.declared
        if spec is None or spec.dtype != torch.uint32:
            return None
        if declared is None or declared.packing != "mlx-affine":
            return group.undeclared("MLX codes", "weight") if "biases" in group.specs else None
        if missing := group.missing("scales", "biases"):
            return missing
        assert declared.block
        size = declared.block[1]
        if len(spec.shape) != 2:
            return group.reject(
                f"is {list(spec.shape)}: experts stacked by MLX are not read", "dequantize it with mlx_lm.convert"
            )
        n, words = spec.shape
        k = words * 32 // declared.bits
        grid = (FLOATS, (n, k // size))
        if words * 32 % declared.bits or k % size:
            return group.reject(f"is {list(spec.shape)}, no {declared.bits}-bit codes in groups of {size}")
        if wrong := group.mismatch({"scales": grid, "biases": grid}, f"{declared.bits} bits in groups of {size}"):
            return wrong
        if group.specs["scales"].dtype != group.specs["biases"].dtype:
            return group.reject("has scales and biases of two types", suffix="scales")
        names = tuple(group.names[suffix] for suffix in self.suffixes)
        kind = f"int{declared.bits} MLX group {size}"
        decoder = MlxDecoder(declared.bits, k, size)
        return StoredWeight(group.module, names, group.others(*self.suffixes), (n, k), kind, decoder, foreign=True)


MLX = Mlx()
