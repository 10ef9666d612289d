"""Solvers: exact formulas, bounds, and what least squares must gain."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.formats import FORMATS, FP8, INT4_BY_GROUP, INT4_G128, INT8, WeightFormat
from tilewright.kernels.formats.mxfp4 import E2M1
from tilewright.kernels.tensors import QTensor
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.blocks import block_amax, encode
from tilewright.packer.solvers.mse import halving_sum

SCALED = [fmt for fmt in FORMATS.values() if fmt.has_scales]


def solve(weight: torch.Tensor, fmt: WeightFormat, solver: str, dtype: torch.dtype = torch.float32) -> QTensor:
    fmt = replace(fmt, scale_dtype=dtype)
    scales = SOLVERS[solver].scales(weight, block_amax(weight, fmt), fmt)
    return QTensor(fmt, encode(weight, scales, fmt), scales)


def squared_error(weight: torch.Tensor, q: QTensor) -> float:
    return float((q.dequantize().double() - weight.double()).square().sum())


def reference(weight: torch.Tensor, fmt: WeightFormat) -> QTensor:
    """Rounding to nearest, one block at a time, in float64 where that cannot change the outcome."""
    n, k = weight.shape
    block_k = fmt.block_k or k
    codes = torch.zeros(n, k, dtype=fmt.code_dtype)
    scales = torch.ones(fmt.scale_rows(n), fmt.scale_columns(k))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            where = (
                slice(row * fmt.block_n, (row + 1) * fmt.block_n),
                slice(column * block_k, (column + 1) * block_k),
            )
            block = weight[where]
            amax = block.abs().max()
            if amax == 0:
                codes[where] = torch.full(block.shape, float(fmt.zero_point)).to(fmt.code_dtype)
                continue
            power = 2.0 ** (math.floor(math.log2(float(amax) / 1.75) + 1) - 2)
            scales[row, column] = power if isinstance(fmt, E2M1) else amax / fmt.qmax
            quotient = (block / scales[row, column]).clamp(-fmt.qmax, fmt.qmax)
            if isinstance(fmt, E2M1):
                grid = fmt.decode(torch.arange(16)).double()
                off = (quotient.double()[..., None] - grid).abs() + 1e-9 * (torch.arange(16) % 2)  # ties to even
                wrong_sign = torch.signbit(quotient)[..., None] != (torch.arange(16) >= 8)
                codes[where] = (off + 100 * wrong_sign).argmin(-1).to(torch.uint8)
                continue
            exact = quotient if fmt == FP8 else quotient.double().round() + fmt.zero_point
            codes[where] = exact.to(fmt.code_dtype)
    return QTensor(fmt, codes, scales)


@settings(max_examples=40)
@given(st.sampled_from([fmt.id for fmt in SCALED]), st.integers(1, 270), st.integers(1, 270), st.integers(0, 1 << 30))
def test_rtn_is_the_formula_block_by_block(fmt_id: str, n: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)
    weight[torch.rand(n, k, generator=generator) < 0.3] = 0
    fmt = FORMATS[fmt_id]
    q, expected = solve(weight, fmt, "rtn"), reference(weight, fmt)
    assert torch.equal(q.scales, expected.scales)
    assert torch.equal(q.codes.view(torch.uint8), expected.codes.view(torch.uint8))


@pytest.mark.parametrize("distribution", ["normal", "student"])
@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_mse_is_never_worse_and_much_better_at_int4(fmt: WeightFormat, distribution: str) -> None:
    torch.manual_seed(3)
    weight = torch.randn(300, 512) if distribution == "normal" else torch.distributions.StudentT(3.0).sample((300, 512))
    dtype = torch.bfloat16 if fmt.bits == 4 else torch.float32
    rtn, mse = (solve(weight, fmt, solver, dtype) for solver in ("rtn", "mse"))
    for row in range(0, 300, max(fmt.block_n, 1)):  # block row by block row, not only in sum
        rows = slice(row, row + max(fmt.block_n, 1))
        errors = [(q.dequantize()[rows].double() - weight[rows].double()).square().sum() for q in (rtn, mse)]
        assert errors[1] <= errors[0] * (1 + 1e-6)
    if fmt.bits == 4 and not isinstance(fmt, E2M1):  # which has powers of two alone to choose from
        assert squared_error(weight, mse) < 0.9 * squared_error(weight, rtn)
    if fmt == INT4_G128:
        assert squared_error(weight, mse) < 0.8 * squared_error(weight, rtn)


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_hard_blocks(fmt: WeightFormat, solver: str) -> None:
    tiny = torch.finfo(torch.float32).tiny
    weight = torch.zeros(256, 256)
    weight[:128, 128:] = 1e-40  # subnormal
    weight[128:, :128] = 3.3e38 * torch.randn(128, 128).clamp(-1, 1)
    weight[128:, 128:] = -5.0
    dtype = torch.bfloat16 if fmt.bits == 4 else torch.float32
    q = solve(weight, fmt, solver, dtype)
    assert q.scales is not None
    assert bool((torch.isfinite(q.scales) & (q.scales >= tiny)).all())
    assert torch.isfinite(q.dequantize()).all()
    assert (q.dequantize()[:128, :128] == 0).all()
    assert torch.equal(q.scales, q.scales.to(dtype).float())
    if fmt.block_k:
        assert q.scales[0, 0] == 1


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_a_run_of_rows_gives_the_same_numbers(fmt: WeightFormat, solver: str) -> None:
    weight = torch.randn(384, 256)
    whole, part = solve(weight, fmt, solver), solve(weight[128:256], fmt, solver)
    unit = fmt.block_n
    assert torch.equal(whole.scales[128 // unit : 256 // unit], part.scales)
    assert torch.equal(whole.codes[128:256].view(torch.uint8), part.codes.view(torch.uint8))


def test_int8_never_uses_minus_128_and_int4_may_use_minus_8() -> None:
    weight = -torch.rand(64, 128) - 0.5
    assert solve(weight, INT8, "rtn").codes.min() == -127
    assert solve(weight, INT4_BY_GROUP[128], "rtn").codes.min() == 1
    assert solve(weight, INT4_BY_GROUP[128], "mse").codes.min() == 0


def test_halving_sum_adds_in_one_fixed_order() -> None:
    values = torch.randn(3, 7)
    a = torch.cat((values, torch.zeros(3, 1)), 1)
    a = a[:, :4] + a[:, 4:]
    a = a[:, :2] + a[:, 2:]
    assert torch.equal(halving_sum(values, 1), a[:, 0] + a[:, 1])
