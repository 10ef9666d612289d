"""reference.py against products of dequantized weights in float64: the formulas mean what they should."""

from __future__ import annotations

import torch

from tilewright.kernels.formats import BF16, FP8, INT4_G32, INT8
from tilewright.kernels.ops import reference
from tilewright.kernels.tensors import QTensor


def _close(y: torch.Tensor, x: torch.Tensor, q: QTensor, bias: torch.Tensor, tolerance: float) -> None:
    expected = x.double() @ q.dequantize().double().T + bias.double()
    assert (y.double() - expected).norm() / expected.norm() < tolerance


def test_quantized_rows_are_within_half_a_step() -> None:
    x = torch.randn(9, 65)
    x[3] = 0
    q, scale = reference.quantize_rows(x)
    assert q.abs().amax() == 127
    assert (q[3] == 0).all()
    assert ((q * scale - x).abs() <= scale * 0.5001).all()


def test_linears_approximate_the_dequantized_product() -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(5, 200), torch.randn(140)
    codes = torch.randn(140, 200).bfloat16()
    _close(reference.linear_bf16(x, codes, bias), x.bfloat16(), QTensor(BF16, codes), bias, 1e-6)
    fp8, scale = torch.randn(140, 200).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.1
    _close(reference.linear_fp8(x, fp8, scale, bias), x.bfloat16(), QTensor(FP8, fp8, scale), bias, 1e-6)
    int8, scale = torch.randint(-127, 128, (140, 200), dtype=torch.int8), torch.rand(140, 1) + 0.1
    _close(reference.linear_int8(x, int8, scale, bias), x, QTensor(INT8, int8, scale), bias, 1e-2)
    int4, scale = torch.randint(0, 16, (140, 200), dtype=torch.uint8), torch.rand(140, 7) + 0.1
    zeros = torch.randint(1, 16, (140, 7), dtype=torch.uint8)
    q = QTensor(INT4_G32, int4, scale, zeros)
    _close(reference.linear_int4(x, int4, zeros, scale, 32, bias), x, q, bias, 1e-2)
    _close(reference.linear_int4(x, int4, zeros, scale, 32, bias, False), x.bfloat16(), q, bias, 1e-6)
