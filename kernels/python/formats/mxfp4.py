"""MXFP4 (OCP Microscaling Formats 1.0): FP4 E2M1 codes in groups of 32 columns, with powers of two as their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import WeightFormat

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; bit 3 is the sign
VALUES = torch.tensor((*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)))
_CODES = torch.tensor((0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7), dtype=torch.uint8)  # of twice a magnitude

E8M0_BIAS = 127
SMALLEST_BYTE, LARGEST_BYTE = 1, 252  # of scales that are made here: 6 * 2^125 is finite, 2^-126 a normal number
LARGEST_EXPONENT = 2  # of a code: 4 = 2^2
ROUND_UP_FROM = 1 << 21  # added to the bits of an fp32 number, brings mantissas from 1.75 on to the next power of two
EXPONENT_FIELD = 0x7F800000


@dataclass(frozen=True)
class E2M1(WeightFormat):
    """FP4 E2M1: sign, 2 bits of exponent, 1 of mantissa; codes 0 to 15, one in a uint8, no NaN and no infinity.

    Scales are 2^-127 .. 2^127, which E8M0 holds in a byte; in fp32 all of them are exact, 2^-127 as a subnormal.
    """

    fractions: tuple[float, ...] = (0.5, 2.0)

    def nearest(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.nearest`; the sign of what becomes zero stays."""
        magnitude = steps.abs().clamp_max(self.qmax)
        unit = self.half_step(magnitude) * 2
        return torch.copysign((magnitude / unit).round() * unit, steps)

    def half_step(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.half_step`: 1/4 below 2, 1/2 below 4, else 1."""
        magnitude = steps.abs()
        return torch.where(magnitude < 2, 0.25, torch.where(magnitude < 4, 0.5, 1.0))

    def encode(self, steps: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.encode`."""
        nearest = self.nearest(steps)
        codes = _CODES.to(steps.device)[(nearest.abs() * 2).to(torch.int64)]
        return codes | (torch.signbit(nearest).to(torch.uint8) << 3)

    def decode(self, codes: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
        """See `WeightFormat.decode`; there are no zero points."""
        assert zeros is None
        return VALUES.to(codes.device)[codes.to(torch.int64)]

    def scales(self, amax: torch.Tensor, fraction: float = 1.0) -> torch.Tensor:
        """See `WeightFormat.scales`: 2^(e - 2), 2^e the power of two below `amax`, the next one from 1.75 * 2^e on.

        So the largest magnitude of a block becomes a code of 4 or 6; compressed-tensors takes the same scales.
        """
        bits = (amax.to(torch.float32).view(torch.int32) + ROUND_UP_FROM) & EXPONENT_FIELD
        byte = (bits >> 23) - LARGEST_EXPONENT + round(torch.tensor(fraction).log2().item())
        scales = from_e8m0(byte.clamp(SMALLEST_BYTE, LARGEST_BYTE).to(torch.uint8))
        return torch.where(amax == 0, 1.0, scales)

    def ideal_scales(self, amax: torch.Tensor) -> torch.Tensor:
        """See `WeightFormat.ideal_scales`: those of `scales`, as no power of two lies between."""
        return self.scales(amax)

    def bars(self, counts: torch.Tensor) -> tuple[list[str], list[int]]:
        """See `WeightFormat.bars`: one bar for each code, zero in two of them."""
        labels = [f"-{magnitude:g}" for magnitude in reversed(MAGNITUDES)] + [f"{value:g}" for value in MAGNITUDES]
        return labels, counts[8:16].flip(0).tolist() + counts[:8].tolist()


def from_e8m0(stored: torch.Tensor) -> torch.Tensor:
    """Scales out of their bytes: `2^(byte - 127)` in fp32, NaN for 255; uint8 or float8_e8m0fnu of any shape."""
    return stored.contiguous().view(torch.float8_e8m0fnu).to(torch.float32, memory_format=torch.contiguous_format)


def to_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `from_e8m0`: uint8 of fp32 powers of two."""
    return ((scales.contiguous().view(torch.int32) & EXPONENT_FIELD) >> 23).to(torch.uint8)


MXFP4 = E2M1("mxfp4", 4, torch.uint8, qmax=6.0, block_n=1, block_k=32, scale_dtype=torch.float8_e8m0fnu)
