"""What a layout promises: a reversible arrangement of codes and scales in named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ..errors import LayoutError
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


def check_tensors(subject: str, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> None:
    """Demand that `tensors` are what `specs` says; tensors that `specs` does not name are ignored.

    Args:
        subject: Layout or module in question, for the message.
        tensors: Suffix -> tensor.
        specs: Suffix -> dtype and shape.

    Raises:
        LayoutError: Lists every tensor that is missing or differs.
    """
    wrong = []
    for suffix, spec in specs.items():
        found = TensorSpec.of(tensors[suffix]) if suffix in tensors else None
        if found != spec:
            is_there = f"is {found.dtype} {list(found.shape)}" if found else "is missing"
            wrong.append(f"`{suffix}` {is_there}, expected {spec.dtype} {list(spec.shape)}")
    if wrong:
        raise LayoutError(f"{subject}: {', '.join(wrong)}")
