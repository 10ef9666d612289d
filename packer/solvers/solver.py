"""What a solver does: choose the scales of a weight. Codes follow from the scales."""

from __future__ import annotations

from typing import Protocol

import torch

from tilewright.kernels.formats import WeightFormat


class Solver(Protocol):
    """Chooses numbers; knows neither names nor layouts.

    Attributes:
        id: Name on the command line.
    """

    @property
    def id(self) -> str:
        """Name on the command line."""

    def scales(self, weight: torch.Tensor, amax: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
        """Scales of `weight`, each from its own block alone.

        Args:
            weight: fp32, bf16 or fp16 [N, K], finite; a run of whole row blocks of a larger one gives the same scales.
            amax: fp32 [scale_rows, scale_columns], `block_amax(weight, fmt)`.
            fmt: Weight format; scales are representable in its `scale_dtype`.

        Returns:
            fp32 [scale_rows, scale_columns], finite and > 0.
        """
