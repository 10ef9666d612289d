"""Which output file holds which tensor, and where in it: known to the byte before anything is computed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tilewright.kernels.packed.safetensors_file import DTYPE_NAMES
from tilewright.kernels.tensors import TensorSpec

from ..plan import AnyTask, Plan

ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register and a row of an AMX tile


@dataclass(frozen=True)
class ShardPlan:
    """One output file.

    Attributes:
        file: Its name.
        names: Its tensors, in their order in the file.
        tensors: Specifications of these and others.
        metadata: Of its header.
        size: Size of the file in bytes.
        tasks: What fills it; no task fills two shards.
    """

    file: str
    names: tuple[str, ...]
    tensors: Mapping[str, TensorSpec] = field(repr=False)
    metadata: Mapping[str, str]
    size: int
    tasks: tuple[AnyTask, ...]

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: nothing of the tensors of other files."""
        return {**self.__dict__, "tensors": {name: self.tensors[name] for name in self.names}}

    @property
    def header(self) -> bytes:
        """Everything before the data, a multiple of 64 bytes. Encoded anew each time, for it is wanted once."""
        return encode_header({name: self.tensors[name] for name in self.names}, self.metadata)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Tensor name -> first byte, counted from the beginning of the file."""
        sizes = [self.tensors[name].nbytes for name in self.names]
        return dict(zip(self.names, itertools.accumulate(sizes, initial=self.size - sum(sizes)), strict=False))


def plan_shards(plan: Plan, max_size: int) -> tuple[ShardPlan, ...]:
    """Cut the output into files of at most `max_size` bytes of data, in the order of `plan.tensors`.

    A weight, its scales and whatever else belongs together stay together; if they alone are larger than `max_size`,
    they get a file of their own.
    """
    shards: list[list[str]] = []
    room = 0
    for unit in _units(plan):
        size = sum(plan.tensors[name].nbytes for name in unit)
        if size > room or not shards:
            shards.append([])
            room = max_size
        shards[-1] += unit
        room -= size
    files = _file_names(len(shards))
    tasks: list[list[AnyTask]] = [[] for _ in shards]
    if len(shards) == 1:
        tasks = [list(plan.tasks)]
    else:
        owner = {name: number for number, names in enumerate(shards) for name in names}
        for task in plan.tasks:
            tasks[owner[task.outputs[0]]].append(task)
    return tuple(
        _plan_shard(plan, file, names, tuple(of)) for file, names, of in zip(files, shards, tasks, strict=True)
    )


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _units(plan: Plan) -> Iterable[list[str]]:
    """Connected components of "same task" and "same packed module", each at the place of its first tensor."""
    leader: dict[str, str] = {}  # of a component: what is not here leads its own

    def find(name: str) -> str:
        while name in leader:
            name = leader[name]
        return name

    def join(first: str, others: Iterable[str]) -> None:
        first = find(first)
        for other in map(find, others):
            if other != first:
                leader[other] = first

    for task in plan.tasks:
        first, *others = task.outputs
        join(first, others)
    modules: dict[str, str] = {}
    for name in plan.tensors if plan.modules else ():
        if (module := name.rpartition(".")[0]) in plan.modules:
            join(modules.setdefault(module, name), (name,))
    units: dict[str, list[str]] = {}
    for name in plan.tensors:
        units.setdefault(find(name), []).append(name)
    return units.values()


def _plan_shard(plan: Plan, file: str, names: list[str], tasks: tuple[AnyTask, ...]) -> ShardPlan:
    order = tuple(_aligned_order(names, plan.tensors))
    held = {m: plan.modules[m] for m in sorted({name.rpartition(".")[0] for name in names} & set(plan.modules))}
    metadata = dict(plan.metadata)
    if held:
        metadata["tilewright.modules"] = _compact(held)
    specs = {name: plan.tensors[name] for name in order}
    size = len(encode_header(specs, metadata)) + sum(spec.nbytes for spec in specs.values())
    return ShardPlan(file, order, plan.tensors, metadata, size, tasks)


def _aligned_order(names: list[str], specs: dict[str, TensorSpec]) -> list[str]:
    """Multiples of 64 bytes first, then by falling size of the element: no holes, and every tensor is aligned.

    What has a size that is a multiple of 64 begins at one; of the rest, each begins at a multiple of its element.
    """
    return sorted(names, key=lambda n: (specs[n].nbytes % ALIGNMENT != 0, -specs[n].dtype.itemsize))


def encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
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
    files = {name: shard.file for shard in shards for name in shard.names}
    size = sum(spec.nbytes for spec in plan.tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
