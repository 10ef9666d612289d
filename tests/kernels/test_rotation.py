"""Rotations: what they are mathematically, and which descriptions of them are refused."""

from __future__ import annotations

import pytest
import torch

from tilewright.kernels.formats import FP8, INT4_G32, INT8
from tilewright.kernels.rotation import Rotation, largest_block, rotate


def sylvester(block: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / block**0.5


@pytest.mark.parametrize("block", [2, 8, 32, 64, 128])
def test_a_rotation_is_a_product_with_a_hadamard_matrix_and_its_own_inverse(block: int) -> None:
    x = torch.randn(3, 3 * block, dtype=torch.float64)
    matrix = torch.block_diag(*[sylvester(block)] * 3)
    assert torch.allclose(rotate(x, block), x @ matrix, atol=1e-12)
    assert torch.allclose(rotate(rotate(x, block), block), x, atol=1e-12)
    weight = torch.randn(5, 3 * block, dtype=torch.float64)
    assert torch.allclose(rotate(x, block) @ rotate(weight, block).T, x @ weight.T, atol=1e-10)
    assert (rotate(x.float(), block).double() - rotate(x, block)).abs().max() < 1e-5


def test_blocks_that_divide() -> None:
    assert [largest_block(k, 64) for k in (576, 1536, 96, 100, 7)] == [64, 64, 32, 4, 1]


@pytest.mark.parametrize(
    "fields",
    [
        *(None, 64, "hadamard", {}, {"kind": "hadamard"}, {"kind": "random", "block": 64}),
        *({"kind": "hadamard", "block": block} for block in (48, 256, 1, True, "64", 64.0)),
        {"kind": "hadamard", "block": 64, "x": 1},
    ],
)
def test_unknown_rotations_are_refused(fields: object) -> None:
    with pytest.raises(ValueError, match="rotation"):
        Rotation.from_json(fields)


def test_what_a_rotation_needs() -> None:
    rotation = Rotation.from_json(Rotation(64).to_json())
    assert rotation == Rotation(64)
    assert rotation.why_not(INT8, 128) is None
    assert rotation.why_not(INT4_G32, 64) is None
    assert "no blocks of 64" in str(rotation.why_not(INT8, 96))
    assert "not multiplied by int8" in str(rotation.why_not(FP8, 128))
