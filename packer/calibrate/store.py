"""What calibration has found, on disk beside the output while a conversion lasts: one file per decoder layer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from tilewright.kernels.errors import PlanError
from tilewright.kernels.formats import FORMATS
from tilewright.kernels.packed.safetensors_file import MappedFile, read_header
from tilewright.kernels.tensors import QTensor

from ..families.layers import LAYER
from ..records.atomic import atomic_write
from ..records.journal import PARTIAL

KEY = "calibration.json"
NOTES = "notes.json"
UNFINISHED = "unfinished"


@dataclass
class Solution:
    """What was found for one layer.

    Attributes:
        weights: Module -> its codes and scales.
        inputs: Module -> the largest magnitude that its static activation scale has to cover.
        replaced: Tensor -> its new content, where scales of channels were moved from one tensor to another.
        tokens: Expert -> tokens that it saw.
    """

    weights: dict[str, QTensor] = field(default_factory=dict)
    inputs: dict[str, float] = field(default_factory=dict)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file under a temporary name, then give it its own."""
        tensors = {f"replaced:{name}": tensor for name, tensor in self.replaced.items()}
        for module, q in self.weights.items():
            assert q.scales is not None
            tensors |= {f"codes:{module}": q.codes, f"scales:{module}": q.scales}
        formats = {module: q.format.id for module, q in self.weights.items()}
        about = {"formats": formats, "inputs": self.inputs, "tokens": self.tokens}
        temporary = path.with_suffix(".unfinished")
        save_file(tensors, temporary, {name: json.dumps(value) for name, value in about.items()})
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> Solution:
        """Read the file back; tensors are views of the mapped file."""
        header = read_header(path)
        file = MappedFile(header)
        about = {name: json.loads(value) for name, value in header.metadata.items()}
        weights = {
            module: QTensor(FORMATS[fmt], file.tensor(f"codes:{module}"), file.tensor(f"scales:{module}"))
            for module, fmt in about["formats"].items()
        }
        replaced = {
            name.removeprefix("replaced:"): file.tensor(name) for name in header.specs if name.startswith("replaced:")
        }
        return Solution(weights, about["inputs"], replaced, about["tokens"])


@dataclass(frozen=True)
class Store:
    """The folder of a calibration.

    Attributes:
        folder: Where it is; not part of what is written, so never in a plan's hash.
    """

    folder: Path

    @staticmethod
    def beside(output: Path) -> Store:
        """The store that belongs to a conversion into `output`: a folder among what is unfinished there."""
        return Store(output.absolute() / PARTIAL / "calibration")

    def begin(self, key: str) -> None:
        """Make the folder ready for the calibration `key`; what another one left is removed.

        Raises:
            PlanError: Something else has the folder's name.
        """
        path = self.folder / KEY
        if self.folder.exists():
            if not path.exists() and any(other.name != UNFINISHED for other in self.folder.iterdir()):
                raise PlanError(f"{self.folder}: needed for the calibration, but holds something else", hint="move it")
            if path.exists() and path.read_text(encoding="utf-8") == key:
                return
            self.end()
        self.folder.mkdir(parents=True)
        atomic_write(path, key.encode(), self.folder / UNFINISHED)

    def finish(self, notes: list[str]) -> None:
        """Say that every layer is there, and what was noticed."""
        atomic_write(self.folder / NOTES, json.dumps(notes).encode(), self.folder / UNFINISHED)

    def finished(self) -> list[str] | None:
        """The notes of a calibration that is complete, else None."""
        path = self.folder / NOTES
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def end(self) -> None:
        """Remove the folder; what says whose it is goes last."""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == KEY) if self.folder.exists() else ():
            path.unlink()
        self.folder.rmdir()

    def end_if_empty(self) -> None:
        """Remove the folder unless it holds a solved layer, which a later run would go on from."""
        if not any(self.folder.glob("*.safetensors")):
            self.end()

    def file(self, layer: str) -> Path:
        """The file of the layer with this path."""
        return self.folder / f"{layer}.safetensors"

    def find(self, name: str) -> Solution:
        """The solution of the layer that a module or tensor belongs to, empty if that layer was not calibrated."""
        layer = LAYER.match(name)
        path = self.file(layer[1]) if layer else None
        return Solution.load(path) if path is not None and path.exists() else Solution()
