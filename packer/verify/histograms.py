"""Counts of codes and scales, added up over the tensors of a format."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.tensors import QTensor

RUN = 1 << 18  # codes that are counted at once
EXPONENTS = 300  # of fp32 scales, 2^-150 to 2^149


@dataclass
class Histogram:
    """What the codes and scales of one format look like.

    Attributes:
        codes: int64 [256], tensors' codes by their byte.
        scales: int64 [EXPONENTS], scales by floor(log2(scale)) + EXPONENTS / 2.
    """

    codes: torch.Tensor = field(default_factory=lambda: torch.zeros(256, dtype=torch.int64))
    scales: torch.Tensor = field(default_factory=lambda: torch.zeros(EXPONENTS, dtype=torch.int64))

    def add(self, q: QTensor) -> None:
        """Count one tensor."""
        for part in q.codes.contiguous().view(torch.uint8).flatten().split(RUN):  # `bincount` makes 8 bytes of each
            self.codes += torch.bincount(part, minlength=256)
        if q.scales is not None:
            exponents = q.scales.clamp_min(2.0**-149).log2().floor().nan_to_num(0, 0, 0).to(torch.int64)
            self.scales += torch.bincount(exponents.flatten() + EXPONENTS // 2, minlength=EXPONENTS)

    def merge(self, other: Histogram) -> None:
        """Add what another one has counted."""
        self.codes += other.codes
        self.scales += other.scales

    def to_json(self, fmt: WeightFormat) -> dict[str, object]:
        """Bars with labels: codes as their format groups them, scales by power of two."""
        labels, counts = fmt.bars(self.codes)
        used = self.scales.nonzero().flatten()
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
        return {
            "codes": {"labels": labels, "counts": counts},
            "scales": {
                "labels": [f"2^{exponent - EXPONENTS // 2}" for exponent in range(first, last + 1)],
                "counts": self.scales[first : last + 1].tolist(),
            },
        }
