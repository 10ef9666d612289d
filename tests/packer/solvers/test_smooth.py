"""Scales of channels: powers of two that lower the output error where inputs have outlier channels."""

from __future__ import annotations

import torch

from tilewright.kernels.formats import INT4_G64
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.smooth import LARGEST, Reader, channel_exponents


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
