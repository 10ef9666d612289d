"""Quantized sources in memory, and what Tilewright reads of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tilewright.kernels.tensors import TensorSpec
from tilewright.packer.checkpoint import detect_weights
from tilewright.packer.checkpoint.details import Details
from tilewright.packer.checkpoint.matrices import matrices_of
from tilewright.packer.families import family_of

Read = Callable[..., dict[str, torch.Tensor]]


class RefusedError(Exception):
    """The source was refused, with these reasons."""


def read_source(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Module -> values fp32 [N, K] of every matrix of a source, read in two strips.

    Raises:
        RefusedError: The source, or a part of it, is refused.
    """
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    inventory = detect_weights(specs, config, Details(metadata or {}, tensors.__getitem__))
    matrices = matrices_of(inventory.weights, tensors, config, family_of(config))
    if rejects := [*inventory.rejects, *matrices.rejects]:
        raise RefusedError("\n".join(map(str, rejects)))
    values = {}
    for matrix in matrices.found:
        stored = [
            tensors[source.name] if source.index is None else tensors[source.name][source.index]
            for source in matrix.sources
        ]
        n, middle = matrix.shape[0], matrix.shape[0] // 3
        strips = [matrix.values(stored, 0, middle), matrix.values(stored, middle, n)]
        values[matrix.module] = torch.cat([strip.to(torch.float32) for strip in strips])
        assert tuple(values[matrix.module].shape) == matrix.shape
    return values


@pytest.fixture
def read() -> Read:
    """read(tensors, config): the values of every matrix; raises `RefusedError`."""
    return read_source
