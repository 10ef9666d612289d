"""What a layout promises: a reversible arrangement of codes and scales in named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ..formats import WeightFormat
from ..tensors import QTensor, Reject, TensorSpec


class Layout(Protocol):
    """Arranges a `QTensor` in the bytes that some reader wants, and back.

    Checkpoint layouts spell a weight as serving engines read it from disk; packed layouts put it in the byte order of a
    kernel. `pack` depends on its argument alone, never on the machine that runs it, and `unpack(pack(q))` equals `q`.

    Attributes:
        id: Stable name, written into packed files.
        version: Raised whenever the bytes of the same id change.
    """

    @property
    def id(self) -> str:
        """Stable name of the layout."""

    @property
    def version(self) -> int:
        """Version of the byte formula."""

    def accepts(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> Reject | None:
        """Why this layout cannot hold such a weight (`Reject.name` is the layout's id), or None if it can."""

    def specs(self, fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1) -> dict[str, TensorSpec]:
        """Suffix, dtype and shape of every tensor that `pack` will give for a weight of this logical shape."""

    def pack(self, q: QTensor) -> dict[str, torch.Tensor]:
        """The named tensors, contiguous, exactly as `specs` says."""

    def unpack(
        self, tensors: Mapping[str, torch.Tensor], fmt: WeightFormat, shape: tuple[int, ...], parts: int = 1
    ) -> QTensor:
        """The exact inverse of `pack`.

        Raises:
            LayoutError: A tensor is missing or does not have the dtype and shape that `specs` demands.
        """
