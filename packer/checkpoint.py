"""Open a checkpoint: names, dtypes, shapes, config and side files, from headers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilewright.kernels.safetensors_file import Entry, Header, MappedFile
from tilewright.kernels.tensors import TensorSpec

from .plan import Source


@dataclass(frozen=True)
class Checkpoint:
    """A checked source directory.

    Attributes:
        root: The directory.
        config: Its config.json.
        headers: Shard file name -> header.
        files: Tensor name -> shard file name, as the index says.
        side_files: Paths relative to `root` of everything that is neither weights nor their index.
    """

    root: Path
    config: dict[str, Any]
    headers: dict[str, Header]
    files: dict[str, str]
    side_files: tuple[Path, ...]
    _maps: dict[str, MappedFile] = field(default_factory=dict, repr=False, compare=False)

    def entry(self, name: str) -> Entry:
        """Where tensor `name` lies in its file."""
        return self.headers[self.files[name]].entries[name]

    def spec(self, name: str) -> TensorSpec:
        """Data type and shape of tensor `name`."""
        return self.entry(name).spec

    def tensor(self, source: Source) -> torch.Tensor:
        """The tensor, or the slice of it, as a view of the mapped file."""
        file = self.files[source.name]
        if file not in self._maps:
            self._maps[file] = MappedFile(self.headers[file])
        tensor = self._maps[file].tensor(source.name)
        return tensor if source.index is None else tensor[source.index]
