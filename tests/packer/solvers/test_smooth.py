"""Scales of channels: powers of two that lower the output error where inputs have outlier channels."""

from __future__ import annotations

import pytest
import torch

from tilewright.kernels.formats import INT4_G64, INT8
from tilewright.kernels.rotation import Rotation
from tilewright.packer.families.norms import of_columns, of_rows
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.smooth import LARGEST, Reader, channel_exponents, smoothing_exponents


def output_error(reader: Reader, exponents: torch.Tensor, x: torch.Tensor) -> float:
    factors = torch.exp2(exponents.float())
    q = reader.quantized(factors, SOLVERS["mse"])
    return float(((x / factors) @ q.dequantize().T - x @ reader.weight.T).norm())


def test_outlier_channels_are_protected() -> None:
    torch.manual_seed(0)
    x = torch.randn(800, 128)
    outliers = torch.randperm(128)[:4]
    x[:, outliers] *= 100  # so much that no draw of the weights makes up for it
    seen, unseen = x.split(400)
    readers = [Reader(torch.randn(n, 128), INT4_G64) for n in (32, 48)]
    exponents = channel_exponents(readers, seen.T @ seen, SOLVERS["mse"])
    assert exponents.dtype == torch.int8
    assert int(exponents.abs().max()) <= LARGEST
    assert int(exponents[outliers].min()) > int(exponents.float().median())
    for reader in readers:
        assert output_error(reader, exponents, unseen) < 0.9 * output_error(reader, torch.zeros(128), unseen)


def test_even_inputs_and_no_inputs_leave_weights_alone() -> None:
    torch.manual_seed(1)
    reader = Reader(torch.randn(16, 64), INT4_G64)
    for hessian in (torch.eye(64) * 7, torch.zeros(64, 64)):
        assert channel_exponents([reader], hessian, SOLVERS["rtn"]).eq(0).all()


def test_channels_without_input_are_left_alone() -> None:
    torch.manual_seed(2)
    x = torch.randn(300, 64)
    x[:, :3] *= 100
    x[:, 60:] = 0
    exponents = channel_exponents([Reader(torch.randn(32, 64), INT4_G64)], x.T @ x, SOLVERS["mse"])
    assert exponents[60:].eq(0).all()
    assert exponents[:3].gt(0).all()


def served_error(reader: Reader, exponents: torch.Tensor, x: torch.Tensor) -> float:
    """Error of the output with activations rounded to int8 by token, too, over the output."""
    factors = torch.exp2(exponents.float())
    scaled, weight = x / factors, reader.quantized(factors, SOLVERS["rtn"]).dequantize()
    if reader.rotation:
        scaled = reader.rotation.of(scaled)
    step = scaled.abs().amax(1, keepdim=True) / 127
    wanted = x @ reader.weight.T
    return float(((scaled / step).round() * step @ weight.T - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rotation", [None, Rotation(32)])
def test_smoothing_lowers_what_rounded_activations_cost(rotation: Rotation | None) -> None:
    torch.manual_seed(2)
    x = torch.randn(600, 96)
    x[:, torch.randperm(96)[:3]] *= 60
    seen, unseen = x.split(300)
    readers = [Reader(torch.randn(n, 96), INT8, rotation) for n in (40, 24)]
    exponents = smoothing_exponents(readers, seen, SOLVERS["rtn"])
    assert exponents.dtype == torch.int8
    assert int(exponents.abs().max()) <= LARGEST
    for reader in readers:
        assert served_error(reader, exponents, unseen) < 0.7 * served_error(reader, torch.zeros(96), unseen)


def test_heads_that_share_channels_get_the_same_exponents() -> None:
    torch.manual_seed(3)
    x = torch.randn(300, 2 * 3 * 8) * torch.logspace(-1, 1, 48)[torch.randperm(48)]
    reader = Reader(torch.randn(20, 48), INT8)
    exponents = smoothing_exponents([reader], x, SOLVERS["rtn"], repeats=3, head=8)
    assert exponents.any()
    by_head = exponents.view(2, 3, 8)
    assert torch.equal(by_head, by_head[:, :1].expand(2, 3, 8))
    assert served_error(reader, exponents, x) < served_error(reader, torch.zeros(48), x)
    assert torch.equal(of_columns(of_rows(exponents, 3, 8), 3, 8), exponents)


def test_smoothing_leaves_channels_without_input_alone() -> None:
    x = torch.randn(64, 32)
    x[:, [3, 9]] = 0
    exponents = smoothing_exponents([Reader(torch.randn(8, 32), INT8)], x, SOLVERS["rtn"])
    assert exponents[[3, 9]].eq(0).all()
    assert smoothing_exponents([Reader(torch.randn(8, 32), INT8)], torch.zeros(4, 32), SOLVERS["rtn"]).eq(0).all()
