"""What the shards of a checkpoint say about packed modules, what lies beside them, and the matrices in a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.module_spec import QUANT_METHOD, ModuleSpec, described_modules
from tilewright.kernels.tensors import QTensor

from .declared import quantization_config
from .detection import Inventory, detect_weights
from .files import Checkpoint


def packed_modules(checkpoint: Checkpoint) -> dict[str, ModuleSpec]:
    """The packed modules of a checkpoint by name; none for one that is not packed."""
    modules = {
        name: ModuleSpec.from_json(name, fields)
        for header in checkpoint.headers.values()
        for name, fields in described_modules(header).items()
    }
    for name, spec in modules.items():  # before anybody walks through the experts that a header claims
        for suffix, wanted in spec.tensors().items():
            if (full := f"{name}.{suffix}") in checkpoint.files and checkpoint.spec(full) != wanted:
                raise CheckpointError(f"{checkpoint.root}: `{full}` is not what its description makes it, {wanted}")
    return modules


def config_before_packing(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as it was before packing: tensors that no module holds are still spelled as it says."""
    block = quantization_config(config)
    is_packed = block.get("quant_method") == QUANT_METHOD
    return {**config, "quantization_config": block.get("source")} if is_packed else {**config}


def stored_inventory(checkpoint: Checkpoint) -> Inventory:
    """Everything that is stored as checkpoints store it: all of one that is not packed, else what no module holds.

    Raises:
        CheckpointError: Some of it cannot be read as weights; lists it.
    """
    modules = packed_modules(checkpoint)
    owned = {f"{name}.{suffix}" for name, spec in modules.items() for suffix in spec.tensors()}
    specs = {name: checkpoint.spec(name) for name in checkpoint.files if name not in owned}
    inventory = detect_weights(specs, config_before_packing(checkpoint.config), checkpoint.details)
    if inventory.rejects:
        raise CheckpointError(f"{checkpoint.root}: cannot be read:\n  " + "\n  ".join(map(str, inventory.rejects)))
    return inventory


def join_rows(weights: Sequence[QTensor], parts: int) -> QTensor:
    """Weights of one format and K as one weight, one under the other.

    Args:
        weights: Each with its own grid of scales; with `parts` 1 and more than one of them, of whole blocks of rows.
        parts: 1, or their number if they are equally large and stay parts.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    assert parts in {1, len(weights)}
    assert all(weight.format == first.format for weight in weights)
    scales = [weight.scales for weight in weights if weight.scales is not None]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    assert len(zeros) in {0, len(weights)}, "parts with and without zero points"
    bits = [weight.codes.view(torch.uint8) if weight.codes.itemsize == 1 else weight.codes for weight in weights]
    return QTensor(
        first.format,
        torch.cat(bits).view(first.codes.dtype),
        torch.cat(scales) if scales else None,
        torch.cat(zeros) if zeros else None,
        parts,
    )


def split_rows(q: QTensor, rows: Sequence[int]) -> list[QTensor]:
    """The inverse of `join_rows`; `rows` are those of each weight."""

    def split(tensor: torch.Tensor | None, sizes: Sequence[int]) -> Sequence[torch.Tensor | None]:
        return [None] * len(rows) if tensor is None else tensor.split(list(sizes), -2)

    grid = [q.format.scale_rows(n) for n in rows] if q.format.has_scales else rows
    split_up = zip(split(q.codes, rows), split(q.scales, grid), split(q.zeros, grid), strict=True)
    return [QTensor(q.format, codes, scales, zeros) for codes, scales, zeros in split_up if codes is not None]


def is_packed(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a packed directory."""
    return any("tilewright.packed" in header.metadata for header in checkpoint.headers.values())
