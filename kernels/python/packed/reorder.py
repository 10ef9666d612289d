"""Put experts that were packed for an engine's CUTLASS kernel into the order of the bundled one, where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import LayoutError
from ..layouts.gpu_cutlass import GPU_CUTLASS_W4, GPU_TRTLLM_W4
from ..layouts.gpu_hopper import GPU_HOPPER_W4
from .module_spec import ModuleSpec

REORDERED = (GPU_CUTLASS_W4.id, GPU_TRTLLM_W4.id)


def reordered_spec(name: str, spec: ModuleSpec) -> ModuleSpec:
    """What a packed module is after `reorder`; itself if it needs none.

    Raises:
        LayoutError: The bundled kernel cannot hold it.
    """
    if spec.layout.id not in REORDERED:
        return spec
    if reject := GPU_HOPPER_W4.accepts(spec.format, spec.shape, spec.parts):
        raise LayoutError(f"{name}: {reject}")
    return replace(spec, layout=GPU_HOPPER_W4)


def reorder(spec: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `reordered_spec`, made matrix by matrix so that little memory is needed beside them.

    Args:
        spec: The module as it is stored, in one of the layouts `REORDERED`.
        tensors: Its tensors, on the device that does the work.
    """
    stored = {suffix: tensors[suffix] for suffix in spec.layout.specs(spec.format, spec.shape, spec.parts)}
    if len(spec.shape) == 2:
        return _reorder_matrix(spec, stored)
    device = next(iter(stored.values())).device
    specs = GPU_HOPPER_W4.specs(spec.format, spec.shape, spec.parts)
    result = {suffix: torch.empty(s.shape, dtype=s.dtype, device=device) for suffix, s in specs.items()}
    for number in range(spec.shape[0]):
        matrix = _reorder_matrix(spec, {suffix: tensor[number] for suffix, tensor in stored.items()})
        for suffix, tensor in matrix.items():
            result[suffix][number] = tensor
    return result


def _reorder_matrix(spec: ModuleSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return GPU_HOPPER_W4.pack(spec.layout.unpack(tensors, spec.format, spec.shape[-2:], spec.parts))
