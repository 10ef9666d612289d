"""Rotations of a Linear's input: outliers of a few columns are spread over a block before activations are rounded.

A rotated weight is `W H`, made before it is quantized, and multiplies the rotated input `x H`: as H is orthogonal and
symmetric, `(x H) (W H)^T = x W^T`. Kernels rotate while they quantize activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .formats import WeightFormat
from .formats.integer import IntegerFormat
from .tensors import Reject

KIND = "hadamard"
LARGEST_BLOCK = 128
NAMES = tuple(f"{KIND}-{block}" for block in (32, 64, LARGEST_BLOCK))  # rotations that are asked for by name


@dataclass(frozen=True)
class Rotation:
    """Multiplication of each block of columns by a Hadamard matrix: what the key `rotation` of a packed module says.

    Attributes:
        block: Columns of a block, a power of two from 2 to `LARGEST_BLOCK` that divides K.
    """

    block: int

    def __str__(self) -> str:
        """Its name."""
        return f"{KIND}-{self.block}"

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """`x H` for an x [.., K] of 16 or 32 bits, in fp32; of a rotated weight, the one before."""
        return rotate(x.to(torch.float32), self.block)

    def to_json(self) -> dict[str, Any]:
        """The value of the key."""
        return {"kind": KIND, "block": self.block}

    @staticmethod
    def from_json(fields: object) -> Rotation:
        """The inverse of `to_json`.

        Raises:
            ValueError: It is a rotation that this release does not know, or none.
        """
        if not isinstance(fields, Mapping) or set(fields) != {"kind", "block"} or fields["kind"] != KIND:
            raise ValueError(f"unknown rotation {str(fields)[:200]}")
        block = fields["block"]
        if type(block) is not int or not 2 <= block <= LARGEST_BLOCK or block & (block - 1):
            raise ValueError(f"rotation in blocks of {str(block)[:50]}, not of a power of two up to {LARGEST_BLOCK}")
        return Rotation(block)

    @staticmethod
    def named(name: str | None, k: int) -> Rotation | None:
        """The rotation `hadamard-64`, or another of `NAMES`, for K columns; None where it would rotate nothing."""
        block = largest_block(k, int(name.rpartition("-")[2])) if name else 1
        return Rotation(block) if block > 1 else None

    def why_not(self, fmt: WeightFormat, k: int) -> Reject | None:
        """Why a weight of this format and width cannot be one that takes rotated inputs, or None if it can."""
        if not isinstance(fmt, IntegerFormat):
            return Reject("rotation", f"weights in `{fmt.id}` are not multiplied by int8 activations")
        if k % self.block:
            return Reject("rotation", f"{k} columns are no blocks of {self.block}")
        return None


def largest_block(k: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides K; 1, which rotates nothing, for an odd K."""
    return min(k & -k, wanted)


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """`x H`: each run of `block` columns times the Hadamard matrix of Sylvester's order over `sqrt(block)`.

    The sums are taken as the kernels take them: for h = 1, 2, 4 .. block / 2 columns i and i + h of each block become
    their sum and their difference; in the end all are multiplied by `1 / sqrt(block)`, rounded to the dtype.

    Args:
        x: fp32 or float64 [.., K].
        block: A power of two that divides K.

    Returns:
        [.., K] in the same dtype; `rotate(rotate(x, b), b)` is x within rounding.
    """
    h, y = 1, x
    while h < block:
        pairs = y.reshape(*x.shape[:-1], -1, 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([low + high, low - high], -2).reshape(x.shape)
        h *= 2
    return y * torch.tensor(1 / math.sqrt(block), dtype=x.dtype)
