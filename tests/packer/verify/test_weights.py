"""Weight comparison on directories made in memory: sound candidates pass, each kind of damage is named and on top."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.formats import BF16, FORMATS, FP8, INT4_G32, INT4_G128, INT8, MXFP4, WeightFormat
from tilewright.kernels.tensors import QTensor
from tilewright.packer.checkpoint.contents import Contents, LogicalTensor
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.blocks import block_amax, encode
from tilewright.packer.solvers.gptq import ErrorFeedback
from tilewright.packer.solvers.solver import Solver
from tilewright.packer.verify.bounds import allowed_error
from tilewright.packer.verify.measures import measure, measure_formula
from tilewright.packer.verify.weight_error import coded_error
from tilewright.packer.verify.weights import TensorResult, compare_weights

SCALED = [fmt for fmt in FORMATS.values() if fmt.has_scales]


def rtn(weight: torch.Tensor, fmt: WeightFormat, target: float | None = None) -> QTensor:
    """Round to nearest in float64, element by element: an oracle that shares no code with the bound."""
    n, k = weight.shape
    block_k = fmt.block_k or k
    scales = torch.ones(-(-n // fmt.block_n), -(-k // block_k))
    codes = torch.zeros(n, k, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = slice(i * fmt.block_n, (i + 1) * fmt.block_n), slice(j * block_k, (j + 1) * block_k)
            block = weight[rows, columns].double()
            if block.abs().max() > 0:
                scales[i, j] = (block.abs().max() / (target or fmt.qmax)).float().clamp_min(2.0**-126)
                if fmt is MXFP4:  # the largest magnitude lies below 1.75 times the power of two that becomes 4
                    mantissa, exponent = math.frexp(float(block.abs().max()))
                    scales[i, j] = max(2.0 ** (exponent - (mantissa < 0.875) - 2), 2.0**-127)
            codes[rows, columns] = block / scales[i, j].double()
    if fmt is FP8:
        return QTensor(fmt, codes.clamp(-448, 448).float().to(torch.float8_e4m3fn), scales)
    if fmt is MXFP4:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        nearest = (codes.abs().unsqueeze(-1) - grid).abs().argmin(-1)
        return QTensor(fmt, (nearest + 8 * (codes < 0)).to(torch.uint8), scales)
    return QTensor(fmt, (codes.round().clamp(-fmt.qmax, fmt.qmax) + fmt.zero_point).to(fmt.code_dtype), scales)


def directory(weights: dict[str, torch.Tensor | QTensor], dropped: dict[str, str] | None = None) -> Contents:
    found = {
        name: LogicalTensor(name, tuple(w.shape), w.format if isinstance(w, QTensor) else None, lambda w=w: w)
        for name, w in weights.items()
    }
    return Contents("directory", found, dropped or {}, {})


def results(reference: Contents, candidate: Contents, limit: float | None = None) -> list[TensorResult]:
    found = [result for result, _ in compare_weights(reference, candidate, limit)]
    return sorted(found, key=lambda result: result.badness, reverse=True)


@settings(max_examples=40)
@given(
    fmt=st.sampled_from(SCALED),
    n=st.integers(1, 140),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    tail=st.sampled_from(["normal", "heavy", "constant", "grid", "tiny", "zeros"]),
)
def test_nearest_rounding_is_sound(fmt: WeightFormat, n: int, k: int, seed: int, tail: str) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(n, k)
    match tail:
        case "heavy":
            weight = weight / (torch.randn(n, k).abs() + 0.05)
        case "constant":
            weight = torch.full((n, k), 0.37)
        case "grid":
            weight = torch.randint(-8, 8, (n, k)) * 0.013
        case "tiny":
            weight = weight * 1e-40
        case "zeros":
            weight[: n // 2] = 0
    q = rtn(weight, fmt)
    error = coded_error(weight, q, exact=False)
    assert error.sound, error
    assert error.relative <= error.bound or error.relative == 0
    assert error.largest == pytest.approx(float((q.dequantize() - weight).abs().max()))


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_other_sound_scales_pass(fmt: WeightFormat) -> None:
    """Half a step wider range, as compressed-tensors chooses it, and scales rounded to bf16."""
    torch.manual_seed(5)
    weight = torch.randn(256, 512)
    for wider in (0, 0 if fmt is FP8 else 0.5):
        q = rtn(weight, fmt, target=fmt.qmax + wider)
        assert q.scales is not None
        for scales in (q.scales, q.scales.bfloat16().float()):
            assert coded_error(weight, QTensor(fmt, q.codes, scales), exact=False).sound


@pytest.mark.parametrize("fmt", [fmt for fmt in SCALED if fmt is not MXFP4], ids=lambda fmt: fmt.id)  # powers of two
@pytest.mark.parametrize("up", [False, True])
def test_the_worst_rounding_of_scales_passes(fmt: WeightFormat, up: bool) -> None:
    """Every scale lies almost half-way between two bf16 numbers, and most values half-way between two codes."""
    codes = torch.arange(-fmt.qmax, fmt.qmax).repeat(256, 40)[:, :512]
    codes[:, :: fmt.block_k or 512] = fmt.qmax
    scale = 1 + 2.0**-8 + (2.0**-14 if up else -(2.0**-14))
    weight = codes.sub(codes.sign() / 2).where(codes.abs() < fmt.qmax, codes) * scale
    q = rtn(weight, fmt)
    assert q.scales is not None
    rounded = q.scales.bfloat16().float()
    assert (rounded == (1 + 2.0**-7 if up else 1)).all()
    assert coded_error(weight, QTensor(fmt, q.codes, rounded), exact=False).sound


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_damage_is_seen_and_on_top(fmt: WeightFormat) -> None:
    torch.manual_seed(7)
    weights = {f"layers.{i}.weight": torch.randn(256, 256) * (1 + torch.rand(256, 1)) for i in range(4)}
    good = {name: rtn(weight, fmt) for name, weight in weights.items()}
    victim = "layers.2.weight"
    codes, scales = good[victim].codes, good[victim].scales
    assert scales is not None
    swapped, doubled = scales.clone(), scales.clone()
    swapped[[0, -1]] = scales[[-1, 0]]
    doubled[-1, -1] *= 2
    rolled = scales.roll(1, 0) if len(scales) > 2 else scales.flip(0)
    damaged = {
        "swapped scale rows": QTensor(fmt, codes, swapped),
        "one doubled scale": QTensor(fmt, codes, doubled),
        "every scale on the next row": QTensor(fmt, codes, rolled),
        "transposed": QTensor(fmt, codes.T.contiguous(), scales),
        "shifted by one code": QTensor(fmt, codes.view(torch.uint8).roll(1, -1).view(codes.dtype), scales),
        "another tensor": good["layers.1.weight"],
        "negative": QTensor(fmt, codes, -scales),
    }
    for what, bad in damaged.items():
        found = results(directory(weights), directory(good | {victim: bad}))
        assert [r.name for r in found if r.failed] == [victim], what
        assert found[0].name == victim, what
        assert "block" in found[0].note


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=lambda solver: solver.id)
def test_what_our_solvers_choose_is_sound(fmt: WeightFormat, solver: Solver) -> None:
    torch.manual_seed(9)
    for weight in (torch.randn(128, 256), torch.randn(128, 256) / (torch.randn(128, 256).abs() + 0.1)):
        for scale_dtype in (torch.float32, torch.bfloat16):
            stored = replace(fmt, scale_dtype=scale_dtype)
            scales = solver.scales(weight, block_amax(weight, stored), stored)
            q = QTensor(stored, encode(weight, scales, stored), scales)
            assert coded_error(weight, q, exact=False).sound


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_a_scale_that_is_only_a_little_wrong_is_seen(fmt: WeightFormat) -> None:
    """A tenth off: less than the error of int4 itself, but its codes do not belong to it."""
    torch.manual_seed(3)
    weight = torch.randn(512, 256)
    q = rtn(weight, fmt)
    assert q.scales is not None
    scales = q.scales.clone()
    scales[1, -1] *= 1.1
    error = coded_error(weight, QTensor(fmt, q.codes, scales), exact=False)
    assert not error.sound
    assert error.outliers == ((1, scales.shape[1] - 1),)


def test_error_feedback_is_no_damage() -> None:
    """Codes that make up for each other's errors break the rule of the nearest code everywhere, on purpose."""
    torch.manual_seed(4)
    weight, inputs = torch.randn(64, 256), torch.randn(600, 256)
    mixed = inputs @ (torch.eye(256) + torch.randn(256, 256) / 10)  # columns that are much alike
    fmt = replace(INT4_G128, scale_dtype=torch.float32)
    q = ErrorFeedback(SOLVERS["mse"]).solve(weight, (mixed.T @ mixed).double(), fmt)
    assert coded_error(weight, q, exact=False).outliers == ()
    assert not coded_error(weight, q, exact=False).sound
    assert coded_error(weight, q, exact=False, feedback=True).sound
    assert q.scales is not None
    for damaged in (
        QTensor(INT4_G128, q.codes.flip(0), q.scales),
        QTensor(INT4_G128, q.codes, 2 * q.scales),
        QTensor(INT4_G128, q.codes, q.scales * math.nan),
    ):
        assert not coded_error(weight, damaged, exact=False, feedback=True).sound


@pytest.mark.parametrize("fmt", [*SCALED, BF16], ids=lambda fmt: fmt.id)
def test_large_weights_are_judged_in_runs_of_rows(fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    weight = torch.randn(300, 260)
    q = rtn(weight, fmt) if fmt.has_scales else QTensor(fmt, weight.bfloat16())
    if q.scales is not None:
        q.scales[1, 0] *= 1.2
    found = []
    for run in (1 << 20, 3000):
        monkeypatch.setattr("tilewright.packer.verify.bounds.RUN", run)
        found.append(coded_error(weight, q, exact=False))
    assert found[0].outliers == found[1].outliers
    assert found[0].largest == found[1].largest
    if fmt.has_scales:
        assert found[0].block == found[1].block == (1, 0)
        assert (found[0].bound, found[0].ratio) == pytest.approx((found[1].bound, found[1].ratio))
    assert found[0].relative == pytest.approx(found[1].relative)


def test_not_finite_fails() -> None:
    weight = torch.randn(64, 256)
    q = rtn(weight, INT8)
    assert q.scales is not None
    for value in (math.nan, math.inf):
        scales = q.scales.clone()
        scales[5] = value
        (found,) = results(directory({"w": weight}), directory({"w": QTensor(INT8, q.codes, scales)}))
        assert found.failed
        assert found.error is not None
        assert found.error.block == (5, 0)


def test_equal_formats_must_be_equal() -> None:
    q = rtn(torch.randn(64, 256), INT4_G128)
    (same,) = results(directory({"w": q}), directory({"w": q}))
    assert (same.status, same.failed) == ("equal", False)
    codes = q.codes.clone()
    codes[3, 200] ^= 1
    (other,) = results(directory({"w": q}), directory({"w": QTensor(INT4_G128, codes, q.scales)}))
    assert other.failed
    assert "repacking" in other.note


def test_bf16_keeps_bf16_and_rounds_fp32() -> None:
    weight = torch.randn(33, 65)
    half = weight.bfloat16()
    packed = QTensor(BF16, half)
    assert results(directory({"w": half}), directory({"w": packed}))[0].status == "equal"
    assert results(directory({"w": weight}), directory({"w": packed}))[0].status == "ok"
    moved = QTensor(BF16, (half.view(torch.int16) + 1).view(torch.bfloat16))
    assert results(directory({"w": half}), directory({"w": moved}))[0].failed


def test_kept_tensors_keep_every_bit() -> None:
    norm = torch.randn(64)
    names = {"norm": norm, "zero": torch.zeros(3), "ids": torch.arange(5)}
    assert not any(r.failed for r in results(directory(names), directory(names)))
    for name, bad, note in (
        ("norm", norm.bfloat16(), "dtype"),
        ("zero", -torch.zeros(3), "3 of 3"),
        ("ids", torch.arange(6), "shape"),
    ):
        top = results(directory(names), directory(names | {name: bad}))[0]
        assert (top.name, top.status) == (name, "differs")
        assert note in top.note


def test_missing_unexpected_and_dropped() -> None:
    weight = torch.randn(8, 8)
    found = results(directory({"a": weight, "b": weight}), directory({"a": weight, "c": weight}))
    assert {(r.name, r.status) for r in found} == {("a", "equal"), ("b", "missing"), ("c", "unexpected")}
    (one,) = results(directory({"a": weight}), directory({}, dropped={"a": "--mtp drop"}))
    assert (one.status, one.note, one.failed) == ("dropped", "--mtp drop", False)


def test_own_threshold_replaces_the_bound() -> None:
    weight = torch.randn(64, 256)
    reference, candidate = directory({"w": weight}), directory({"w": rtn(weight, INT4_G32)})
    assert not results(reference, candidate, 0.5)[0].failed
    assert results(reference, candidate, 1e-3)[0].failed


def test_bound_is_as_sharp_as_the_format() -> None:
    """A sound weight uses most of the bound, so that no damage of its size can hide in it."""
    torch.manual_seed(1)
    weight = torch.randn(512, 1024)
    for fmt in SCALED:
        found = measure(weight, rtn(weight, fmt))
        allowed = allowed_error(found.norm, found.worst, found.nearest, found.count)
        assert bool((allowed < 1.8 * found.error.sqrt()).float().mean() > 0.9), fmt.id


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_native_measures_are_those_of_the_formula(fmt: WeightFormat, dtype: torch.dtype) -> None:
    """Odd sizes, zeros, tiny and huge rows, wrong scales, cut-off codes: every sum, count and maximum."""
    for seed, (n, k) in enumerate(((1, 1), (3, 96), (130, 300), (5, 1500), (257, 64))):
        generator = torch.Generator().manual_seed(seed)
        size = torch.exp2(
            torch.randint(-9, 9, (n, 1), generator=generator).float() * (1 if dtype.itemsize == 2 else 13)
        )
        weight = (torch.randn(n, k, generator=generator) * size).to(dtype)
        weight[torch.rand(n, k, generator=generator) < 0.05] = 0
        q = rtn(weight.float(), fmt)
        assert q.scales is not None
        q.scales.mul_(1 + 0.3 * (torch.rand(q.scales.shape, generator=generator) < 0.2))
        found = measure(weight, q)
        error, norm, worst, nearest, outside, largest, code = measure_formula(weight, q).unbind(-1)
        for ours, theirs in (
            *((found.error, error), (found.norm, norm), (found.worst, worst), (found.nearest, nearest)),
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        assert torch.equal(found.outside, outside)
        assert torch.equal(found.largest, largest)
        assert torch.equal(found.code, code)
        assert found.count.sum() == n * k


def test_codes_and_scales_that_are_not_finite_are_seen() -> None:
    weight = torch.randn(130, 140)
    q = rtn(weight, FP8)
    assert q.scales is not None
    for place, value in (((0, 1), math.nan), ((1, 1), math.inf), ((1, 0), 0.0)):
        scales = q.scales.clone()
        scales[place] = value
        assert not coded_error(weight, QTensor(FP8, q.codes, scales), exact=False).sound
    codes = q.codes.view(torch.uint8).clone()
    codes[129, 3] = 0x7F  # NaN
    error = coded_error(weight, QTensor(FP8, codes.view(FP8.code_dtype), q.scales), exact=False)
    assert not error.sound
    assert math.isnan(error.largest)
