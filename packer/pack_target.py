"""What a checkpoint is packed for: which layout each of its weights gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.base import Layout
from tilewright.kernels.tensors import Reject

from .architectures.base import Role

PACKED_PREFIXES = ("cpu-", "gpu-")  # ids of layouts that kernels read; all others are checkpoint layouts


class Target(Protocol):
    """What is packed for: decides the layout of each weight."""

    @property
    def id(self) -> str:
        """Name of the target."""

    def layout(self, role: Role, fmt: WeightFormat, shape: tuple[int, ...], parts: int) -> Layout | Reject | None:
        """The layout of a weight; a reject if it cannot be packed; None if this target leaves it as it is."""


@dataclass(frozen=True)
class CpuTarget:
    """Every weight in the first CPU layout that accepts it.

    Attributes:
        preferred: Layout to prefer, or None.
        id: Name of the target.
    """

    preferred: str | None = None
    id: str = "cpu"

    def layout(self, role: Role, fmt: WeightFormat, shape: tuple[int, ...], parts: int) -> Layout | Reject | None:
        """The preferred layout where it accepts the weight, else the first CPU layout that does."""
        names = [self.preferred] if self.preferred else []
        names += [name for name in LAYOUTS if name.startswith(f"{self.id}-")]
        rejects = []
        for name in names:
            reject = LAYOUTS[name].accepts(fmt, shape, parts)
            if reject is None:
                return LAYOUTS[name]
            rejects.append(str(reject))
        return Reject(fmt.id, f"no layout takes {list(shape)}: {'; '.join(rejects)}")
