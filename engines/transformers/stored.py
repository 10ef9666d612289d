"""A packed directory as the tensors of the checkpoint that it was packed from: one for each Linear and each expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from tilewright.kernels.packed.directory import LOWER, UPPER, PackedCheckpoint
from tilewright.kernels.packed.module_spec import ModuleSpec


@dataclass(frozen=True)
class Rows:
    """Some rows of a packed module.

    Attributes:
        module: The module, as it is stored.
        rows: Which rows.
        expert: Place of the expert in the stack; None for a Linear.
    """

    module: str
    rows: slice
    expert: int | None = None


class StoredTensors:
    """Names, shapes and values of the tensors that a packed directory stands for.

    Args:
        packed: The opened directory.

    Attributes:
        shapes: Name -> shape.
        linears: Name of the weight of each packed Linear, joined or not -> name of the Linear in `packed`.
        experts: Name of the routed experts of a layer -> names of the weights of each, gate, up and down.
    """

    def __init__(self, packed: PackedCheckpoint) -> None:
        self._packed = packed
        self._rows: dict[str, Rows] = {}
        self.shapes: dict[str, tuple[int, ...]] = {name: spec.shape for name, spec in packed.plain.items()}
        self.linears: dict[str, str] = {}
        self.experts: dict[str, list[tuple[str, ...]]] = {}
        for name, spec in packed.specs.items():
            if len(spec.shape) == 3:
                self._add_stack(name, spec)
            elif spec.sources or spec.source_layout:  # others are made of another module's weight
                whole = {name: (spec, slice(0, spec.shape[0]))}
                for linear, (part, rows) in (spec.linears() or whole).items():
                    self.linears[f"{linear}.weight"] = linear
                    self._add(linear, Rows(name, rows), part)
        for name in packed.experts:
            upper, lower = packed.specs[f"{name}.{UPPER}"], packed.specs[f"{name}.{LOWER}"]
            self.experts[name] = [
                tuple(f"{template.format(number)}.weight" for template in (*upper.sources, *lower.sources))
                for number in upper.numbers
            ]
        self._unpack = lru_cache(maxsize=2)(self._unpacked)

    def _add_stack(self, name: str, spec: ModuleSpec) -> None:
        size = spec.shape[1] // spec.parts
        for place, number in enumerate(spec.numbers):
            for part, template in enumerate(spec.sources):
                rows = slice(part * size, (part + 1) * size)
                self._add(template.format(number), Rows(name, rows, place), spec)

    def _add(self, source: str, rows: Rows, spec: ModuleSpec) -> None:
        size = rows.rows.stop - rows.rows.start
        self.shapes[f"{source}.weight"] = (size, spec.shape[-1])
        self._rows[f"{source}.weight"] = rows
        if spec.bias_dtype is not None:
            self.shapes[f"{source}.bias"] = (size,)
            self._rows[f"{source}.bias"] = rows

    def module_of(self, name: str) -> str | None:
        """The packed module that holds a tensor; None for one that is stored as it is."""
        rows = self._rows.get(name)
        return rows.module if rows else None

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor: a view of the file if it is stored as it is, else unpacked and dequantized, fp32."""
        rows = self._rows.get(name)
        if rows is None:
            return self._packed.tensor(name)
        if name.endswith(".bias"):
            bias = self._packed.tensor(f"{rows.module}.bias")
            return (bias if rows.expert is None else bias[rows.expert])[rows.rows]
        values = self._unpack(rows.module)
        return (values if rows.expert is None else values[rows.expert])[rows.rows]

    def _unpacked(self, module: str) -> torch.Tensor:
        spec = self._packed.specs[module]
        tensors = {suffix: self._packed.tensor(f"{module}.{suffix}") for suffix in spec.tensors() if suffix != "bias"}
        return spec.layout.unpack(tensors, spec.format, spec.shape, spec.parts).dequantize()
