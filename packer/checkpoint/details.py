"""What names, types and shapes of tensors do not tell: the free metadata of files, and tensors that describe others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.kernels.errors import CheckpointError

LARGEST = 1 << 16  # bytes of a tensor that describes another: a shape, a name, a table of codes


@dataclass(frozen=True)
class Details:
    """What planning has to know of some formats beside headers.

    Attributes:
        metadata: The free-form string maps of all files, joined.
        read: Reads a small tensor by name; None where there are no files, as for an output that is only planned.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], torch.Tensor] | None = None

    @property
    def was_asked(self) -> bool:
        """Whether anything was looked up; not counted here."""
        return False

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of a few bytes.

        Raises:
            CheckpointError: It is too large to describe another tensor, or nothing can be read.
        """
        found = self.read(name) if self.read else None
        if found is None or found.numel() * found.itemsize > LARGEST:
            raise CheckpointError(f"{name}: is no small tensor that can be read while planning")
        return found

    def described(self, key: str) -> dict[str, Any]:
        """The JSON object under a key of the metadata; empty if there is none."""
        try:
            found = json.loads(self.metadata.get(key, "{}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class WatchedDetails(Details):
    """Details that know whether they were asked: what they say of one weight does not hold for others.

    Attributes:
        asked: What for.
    """

    asked: list[str] = field(default_factory=list)

    @property
    def was_asked(self) -> bool:
        """See `Details`."""
        return bool(self.asked)

    def tensor(self, name: str) -> torch.Tensor:
        """See `Details.tensor`."""
        self.asked.append(name)
        return Details.tensor(self, name)

    def described(self, key: str) -> dict[str, Any]:
        """See `Details.described`."""
        self.asked.append(key)
        return Details.described(self, key)


NOTHING = Details()
