"""Hand packed tensors to the CPU kernels of SGLang and vLLM: the same bytes as those engines' own packing.

Engines pack a weight after loading it (`convert_weight_packed`, `convert_weight_packed_scale_zp`) and put the result in
the place of the parameter. `engine_parameters` gives, under the names that the parameters have at that point, tensors
that can take that place; set them and skip the engine's packing. What the engine's kernels cannot run (sizes that we
pad) is refused. The tensors are views of the mapped files, also where an engine merges layers (q, k, v; gate, up) that
were packed as one. Where they were not, they are joined here, which copies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tilewright.kernels.errors import LayoutError
from tilewright.kernels.layouts.cpu_blocks import BLOCK_K, BLOCK_N, row_unit
from tilewright.kernels.model_names import JOINED
from tilewright.kernels.packed.directory import PackedCheckpoint
from tilewright.kernels.packed.module_spec import ModuleSpec

SAME = {
    "cpu-vnni-bf16": {"weight": "weight"},
    "cpu-vnni-int8": {"weight": "weight", "weight_scale": "weight_scale"},
    "cpu-vnni-fp8": {"weight": "weight", "weight_scale_inv": "weight_scale_inv"},
}


@dataclass(frozen=True)
class Engine:
    """What an engine calls the parameters of its packed layers; each has its own in `engines/<id>/parameters.py`.

    Attributes:
        id: Name of the engine.
        suffixes: Layout id -> our suffix -> the engine's.
    """

    id: str
    suffixes: Mapping[str, Mapping[str, str]]


def engine_parameters(packed: PackedCheckpoint, engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every parameter that an engine has once it has packed the model's weights.

    Args:
        packed: The packed directory.
        engine: `engines.sglang.parameters.SGLANG` or `engines.vllm.parameters.VLLM`.

    Yields:
        Parameters of Linears (`<module>.weight`, …, and `bias` in fp32), of experts (`<path>.experts.w13_weight`, …),
        and all tensors that are not packed under their own names.

    Raises:
        LayoutError: The engine's kernels cannot run one of the modules; lists all of them.
    """
    if problems := [reason for name, spec in packed.specs.items() if (reason := _why_not(name, spec, engine.suffixes))]:
        raise LayoutError(f"{packed.root}: kernels of {engine.id} cannot run it:\n  " + "\n  ".join(problems))
    for target, members in _merge(packed).items():
        spec = packed.specs[members[0]]
        stacked = len(spec.shape) == 3
        for suffix in spec.tensors():
            tensors = [_exact(packed.tensor(f"{member}.{suffix}"), packed.specs[member], suffix) for member in members]
            theirs = engine.suffixes[spec.layout.id].get(suffix, suffix)
            yield f"{target}{'_' if stacked else '.'}{theirs}", tensors[0] if len(tensors) == 1 else _join(tensors)
    for name in packed.plain:
        yield name, packed.tensor(name)


def _why_not(name: str, spec: ModuleSpec, known: Mapping[str, object]) -> str | None:
    """Why an engine's kernels cannot run a module, whose sizes they take unpadded."""
    if spec.layout.id not in known:
        return f"{name}: is in layout `{spec.layout.id}`, which is ours alone"
    if any(spec.leading):
        return f"{name}: its share begins inside a block of scales, which only the bundled kernels run"
    *_, n, k = spec.shape
    rows = n // spec.parts
    unit = 16 if spec.layout.id == "cpu-vnni-bf16" and len(spec.shape) == 2 else BLOCK_N
    if rows % unit:
        return f"{name}: N = {rows} is not a multiple of {unit}"
    return f"{name}: K = {k} is not a multiple of {BLOCK_K}" if k % BLOCK_K else None


def _merge(packed: PackedCheckpoint) -> dict[str, list[str]]:
    """Engine module -> our modules whose rows it holds, one under the other."""
    targets: dict[str, list[str]] = {}
    for name in packed.specs:
        path, _, own = name.rpartition(".")
        for merged, members in JOINED.items():
            names = [f"{path}.{member}" for member in members]
            if own in members and _joinable(packed, names):
                targets.setdefault(f"{path}.{merged}", names)
                break
        else:
            targets[name] = [name]
    return targets


def _joinable(packed: PackedCheckpoint, names: list[str]) -> bool:
    """Whether these modules exist and their blocks of rows and of scales follow one another when joined."""
    if not all(name in packed.specs for name in names):
        return False
    specs = [packed.specs[name] for name in names]
    unit = row_unit(specs[0].format)
    kinds = {(spec.layout.id, spec.format.id, spec.shape[-1], spec.bias_dtype is None) for spec in specs}
    return len(kinds) == 1 and all(spec.shape[0] % unit == 0 for spec in specs[:-1])


def _exact(tensor: torch.Tensor, spec: ModuleSpec, suffix: str) -> torch.Tensor:
    """The tensor without padded rows: engines give a last block of 16 rows to bf16 matrices where we pad to 32."""
    n, k = spec.shape[-2:]
    if suffix != "weight" or n % BLOCK_N == 0 or spec.parts > 1:
        return tensor
    full = n // BLOCK_N * BLOCK_N
    pairs = tensor[full:].reshape(k // 2, BLOCK_N, 2)[:, : n - full]
    return torch.cat([tensor[:full], pairs.reshape(n - full, k)])


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One under the other; FP8 tensors cannot be joined everywhere, their bytes can."""
    if tensors[0].itemsize > 1:
        return torch.cat(tensors)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
