"""Round to nearest: the largest magnitude of a block becomes the largest code."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.formats import WeightFormat

from .blocks import scales_from_amax


@dataclass(frozen=True)
class RoundToNearest:
    """scale = amax / qmax."""

    id: str = "rtn"

    def scales(self, weight: torch.Tensor, amax: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
        """See `Solver.scales`."""
        return scales_from_amax(amax, fmt)
