"""Error feedback against its textbook form in fp64, and against rounding to nearest on correlated inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import FORMATS, FP8, INT4_G32, INT4_G64, INT4_G128, INT8, MXFP4, WeightFormat
from tilewright.kernels.formats.mxfp4 import E2M1
from tilewright.kernels.tensors import QTensor
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.blocks import block_amax, encode, expand
from tilewright.packer.solvers.gptq import ErrorFeedback, inverse_root

SCALED = [fmt for fmt in FORMATS.values() if fmt.has_scales]
ODD = {INT8: (13, 70), FP8: (150, 200), INT4_G32: (9, 160), INT4_G64: (7, 192), INT4_G128: (5, 256), MXFP4: (9, 160)}


def fp32_scales(fmt: WeightFormat) -> WeightFormat:
    return replace(fmt, scale_dtype=torch.float32)


def correlated(tokens: int, k: int) -> torch.Tensor:
    """Inputs whose columns depend on each other, as those of a Linear do: fp32 [tokens, k]."""
    mixed = torch.randn(tokens, k // 4) @ torch.randn(k // 4, k) / (k // 4) ** 0.5
    return (mixed + 0.3 * torch.randn(tokens, k)) * torch.rand(k).add(0.2)


def quotient_codes(values: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    if fmt.code_dtype == torch.float8_e4m3fn:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    if isinstance(fmt, E2M1):
        return fmt.nearest(values.float()).double()
    return values.round().clamp(-8 if fmt.zero_point else -127, fmt.qmax)


def textbook(
    weight: torch.Tensor, hessian: torch.Tensor, fmt: WeightFormat, order: torch.Tensor | None
) -> torch.Tensor:
    """Values of the quantized weight: one column at a time, the inverse updated by elimination, all in fp64."""
    n, k = weight.shape
    w, h = weight.double().clone(), hessian.double().clone()
    h += 0.01 * h.diagonal().mean() * torch.eye(k)
    inverse = torch.linalg.inv(h)
    rtn = SOLVERS["rtn"]

    def scales_of(part: torch.Tensor) -> torch.Tensor:
        part = part.float().contiguous()
        return expand(rtn.scales(part, block_amax(part, fmt), fp32_scales(fmt)), fmt, *part.shape).double()

    fixed = scales_of(weight).expand(n, k)
    out = torch.empty_like(w)
    scales = fixed
    for step, j in enumerate((torch.arange(k) if order is None else order).tolist()):
        if order is None and fmt.block_k and step % fmt.block_k == 0:
            scales = torch.cat((fixed[:, :j], scales_of(w[:, j : j + fmt.block_k]), fixed[:, j + fmt.block_k :]), 1)
        out[:, j] = quotient_codes(w[:, j] / scales[:, j], fmt) * scales[:, j]
        error = (w[:, j] - out[:, j]) / inverse[j, j]
        w -= error[:, None] * inverse[j]
        inverse -= inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j].clone()
        inverse[j] = 0
        inverse[:, j] = 0
    return out


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_it_is_the_textbook_algorithm(fmt: WeightFormat, act_order: bool) -> None:
    torch.manual_seed(0)
    n, k = ODD[fmt]
    weight, inputs = torch.randn(n, k), correlated(4 * k, k)
    hessian = inputs.T @ inputs
    q = ErrorFeedback(SOLVERS["rtn"], act_order=act_order).solve(weight, hessian, fp32_scales(fmt))
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if act_order else None
    ours, theirs = q.dequantize().double(), textbook(weight, hessian, fmt, order)
    # A rounding that falls the other way in fp32 changes a whole row from there on; nearly all rows are the same,
    # and one that is not, among a few, weighs a few hundredths.
    same = ((ours - theirs).abs() <= 1e-3 * theirs.abs().max()).all(1).double().mean()
    assert same > 0.6
    errors = [float(((values - weight.double()) @ inputs.T.double()).norm()) for values in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


@pytest.mark.parametrize("inner", ["rtn", "mse"])
@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_outputs_change_less_than_by_rounding_to_nearest(fmt: WeightFormat, inner: str) -> None:
    torch.manual_seed(1)
    n, k = 64, 256
    weight = torch.randn(n, k) * torch.rand(n, 1).add(0.1)
    inputs, unseen = correlated(1500, k).split((1000, 500))
    q = ErrorFeedback(SOLVERS[inner]).solve(weight, inputs.T @ inputs, fp32_scales(fmt))
    scales = SOLVERS[inner].scales(weight, block_amax(weight, fmt), fp32_scales(fmt))
    nearest = QTensor(fmt, encode(weight, scales, fmt), scales)
    assert q.scales is not None
    assert q.codes.shape == weight.shape
    assert q.codes.dtype == fmt.code_dtype
    assert q.scales.shape == nearest.scales.shape  # type: ignore[union-attr]
    assert bool((torch.isfinite(q.scales) & (q.scales > 0)).all())
    for x in (inputs, unseen):
        fed, plain = (float(((values.dequantize() - weight) @ x.T).norm()) for values in (q, nearest))
        assert fed < 0.8 * plain


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_columns_without_input_are_rounded_to_nearest(fmt: WeightFormat, act_order: bool) -> None:
    torch.manual_seed(2)
    n, k = ODD[fmt]
    weight, inputs = torch.randn(n, k), correlated(500, k)
    dead = torch.rand(k) < 0.3
    inputs[:, dead] = 0
    q = ErrorFeedback(SOLVERS["rtn"], act_order=act_order).solve(weight, inputs.T @ inputs, fp32_scales(fmt))
    assert q.scales is not None
    nearest = QTensor(fmt, encode(weight, q.scales, fmt), q.scales).dequantize()
    torch.testing.assert_close(q.dequantize()[:, dead], nearest[:, dead], rtol=0, atol=0)
    nothing = ErrorFeedback(SOLVERS["rtn"]).solve(weight, torch.zeros(k, k), fp32_scales(fmt))
    scales = SOLVERS["rtn"].scales(weight, block_amax(weight, fmt), fp32_scales(fmt))
    assert torch.equal(nothing.codes.float(), encode(weight, scales, fmt).float())  # -0 and 0 are one value


def test_uncorrelated_inputs_leave_nothing_to_feed_back() -> None:
    torch.manual_seed(3)
    weight = torch.randn(8, 128)
    q = ErrorFeedback(SOLVERS["mse"]).solve(weight, torch.eye(128) * 5, INT4_G64)
    scales = SOLVERS["mse"].scales(weight, block_amax(weight, INT4_G64), INT4_G64)
    assert torch.equal(q.codes, encode(weight, scales, INT4_G64))
    assert torch.equal(q.scales, scales)


def test_an_all_zero_weight_stays_zero() -> None:
    inputs = correlated(300, 128)
    q = ErrorFeedback(SOLVERS["mse"]).solve(torch.zeros(4, 128), inputs.T @ inputs, INT4_G32)
    assert bool((q.dequantize() == 0).all())


def test_the_root_is_that_of_the_inverse() -> None:
    torch.manual_seed(4)
    inputs = correlated(50, 96)  # fewer inputs than columns: singular without damping
    hessian = (inputs.T @ inputs).double()
    root = inverse_root(hessian, 0.01).double()
    assert torch.equal(root, root.triu())
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(96)
    torch.testing.assert_close(root.T @ root, torch.linalg.inv(damped), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e9])
def test_a_broken_hessian_is_refused(bad: float) -> None:
    hessian = torch.eye(64)
    hessian[3, 5] = hessian[5, 3] = bad
    with pytest.raises(SchemeError, match="not positive definite"):
        ErrorFeedback(SOLVERS["rtn"]).solve(torch.randn(2, 64), hessian, INT4_G64)
