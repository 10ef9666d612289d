"""Which output file holds which tensor, and where in it: known to the byte before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES
from tilewright.kernels.tensors import TensorSpec

from ..plan import Plan, Task

ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register and a row of an AMX tile


@dataclass(frozen=True)
class ShardPlan:
    """One output file.

    Attributes:
        file: Its name.
        header: Everything before the data, a multiple of 64 bytes.
        offsets: Tensor name -> first byte, counted from the beginning of the file.
        size: Size of the file in bytes.
        tasks: What fills it; no task fills two shards.
    """

    file: str
    header: bytes
    offsets: dict[str, int]
    size: int
    tasks: tuple[Task, ...]


@dataclass
class _Unit:
    """Tensors that belong into one file: those of a packed module, and those that one task gives together."""

    names: list[str]
    size: int


def plan_shards(plan: Plan, max_size: int) -> tuple[ShardPlan, ...]:
    """Cut the output into files of at most `max_size` bytes of data, in the order of `plan.tensors`.

    A weight, its scales and whatever else belongs together stay together; if they alone are larger than `max_size`,
    they get a file of their own.
    """
    shards: list[list[str]] = []
    room = 0
    for unit in _units(plan):
        if unit.size > room or not shards:
            shards.append([])
            room = max_size
        shards[-1] += unit.names
        room -= unit.size
    files = _file_names(len(shards))
    owner = {name: number for number, names in enumerate(shards) for name in names}
    tasks: list[list[Task]] = [[] for _ in shards]
    for task in plan.tasks:
        tasks[owner[task.pieces[0].name]].append(task)
    return tuple(
        _plan_shard(plan, file, names, tuple(of)) for file, names, of in zip(files, shards, tasks, strict=True)
    )


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _units(plan: Plan) -> list[_Unit]:
    """Connected components of "same task" and "same packed module", each at the place of its first tensor."""
    leader = {name: name for name in plan.tensors}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    def join(names: Iterable[str]) -> None:
        first, *rest = [find(name) for name in names]
        for other in rest:
            leader[find(other)] = find(first)

    for task in plan.tasks:
        join(piece.name for piece in task.pieces)
    modules: dict[str, list[str]] = {}
    for name in plan.tensors:
        if (module := name.rpartition(".")[0]) in plan.modules:
            modules.setdefault(module, []).append(name)
    for names in modules.values():
        join(names)
    units: dict[str, _Unit] = {}
    for name, spec in plan.tensors.items():
        unit = units.setdefault(find(name), _Unit([], 0))
        unit.names.append(name)
        unit.size += spec.nbytes
    return list(units.values())


def _plan_shard(plan: Plan, file: str, names: list[str], tasks: tuple[Task, ...]) -> ShardPlan:
    specs = {name: plan.tensors[name] for name in _aligned_order(names, plan.tensors)}
    held = {m: plan.modules[m] for m in sorted({name.rpartition(".")[0] for name in names} & set(plan.modules))}
    metadata = dict(plan.metadata)
    if held:
        metadata["tilewright.modules"] = _compact(held)
    header = encode_header(specs, metadata)
    offsets = {}
    position = len(header)
    for name, spec in specs.items():
        offsets[name] = position
        position += spec.nbytes
    return ShardPlan(file, header, offsets, position, tasks)


def _aligned_order(names: list[str], specs: dict[str, TensorSpec]) -> list[str]:
    """Multiples of 64 bytes first, then by falling size of the element: no holes, and every tensor is aligned.

    What has a size that is a multiple of 64 begins at one; of the rest, each begins at a multiple of its element.
    """
    return sorted(names, key=lambda n: (specs[n].nbytes % ALIGNMENT != 0, -specs[n].dtype.itemsize))


def encode_header(specs: dict[str, TensorSpec], metadata: dict[str, str]) -> bytes:
    """Header of a safetensors file whose tensors follow one another in the order of `specs`.

    Spaces at its end make the data begin at a multiple of 64 bytes.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}  # transformers demands `format`
    position = 0
    for name, spec in specs.items():
        end = position + spec.nbytes
        table[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = _compact(table).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def encode_index(plan: Plan, shards: tuple[ShardPlan, ...]) -> bytes:
    """The index that maps every tensor to its file, as transformers writes it."""
    files = {name: shard.file for shard in shards for name in shard.offsets}
    size = sum(spec.nbytes for spec in plan.tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
