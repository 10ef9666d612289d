"""Every registered operator, called with arguments that break its contract: exceptions, never a signal or a result.

Each wrong call is a right one with something changed, and a right one follows it, whose values are compared with the
reference. `make test` runs a slice of them, on the sanitized library too; by hand, as many as TILEWRIGHT_WRONG_CALLS
says:

    TILEWRIGHT_WRONG_CALLS=100000 python -m pytest tests/kernels/ops/test_wrong_calls.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tilewright.kernels import ops
from tilewright.kernels.formats import BF16, FP8, INT4_BY_GROUP, INT8, MXFP4, WeightFormat
from tilewright.kernels.layouts.cpu_float import CPU_VNNI_BF16, CPU_VNNI_FP8
from tilewright.kernels.layouts.cpu_int4 import CPU_VNNI_INT4
from tilewright.kernels.layouts.cpu_int4_compact import CPU_INT4_COMPACT
from tilewright.kernels.layouts.cpu_int8 import CPU_VNNI_INT8
from tilewright.kernels.layouts.cpu_mxfp4 import CPU_MXFP4
from tilewright.kernels.modules import norms  # noqa: F401  (gives rms_norm its fake implementation)
from tilewright.kernels.ops import reference, reference_experts
from tilewright.kernels.tensors import QTensor

CALLS = int(os.environ.get("TILEWRIGHT_WRONG_CALLS", "2000"))
ISAS = [status.name for status in ops.kernel_report() if status.available]
Arguments = dict[str, Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A right call of one operator, what it gives, and which of its tensors may be any floats or any strides."""

    operator: str
    arguments: Arguments
    expected: torch.Tensor
    tolerance: float = 0.0
    floats: tuple[str, ...] = ("x",)
    strided: tuple[str, ...] = ("x",)

    def call(self, arguments: Arguments, overload: str = "default") -> Any:
        return getattr(getattr(torch.ops.tilewright, self.operator), overload)(**arguments)

    @property
    def has_out(self) -> bool:
        return "out" in getattr(torch.ops.tilewright, self.operator).overloads()

    def check(self, y: torch.Tensor) -> None:
        assert y.dtype == self.expected.dtype
        assert y.shape == self.expected.shape
        if self.tolerance:
            error = (y.double() - self.expected.double()).norm()
            assert error <= self.tolerance * self.expected.double().norm(), self.operator
        else:
            assert torch.equal(y, self.expected), self.operator


def quantized(fmt: WeightFormat, n: int, k: int) -> QTensor:
    if fmt is BF16:
        return QTensor(BF16, torch.randn(n, k).bfloat16())
    scales = torch.rand(fmt.scale_rows(n), fmt.scale_columns(k)) * 0.01 + 1e-4
    if fmt is FP8:
        return QTensor(FP8, torch.randn(n, k).to(torch.float8_e4m3fn), scales)
    if fmt is MXFP4:
        return QTensor(fmt, torch.randint(0, 16, (n, k)).byte(), scales.log2().floor().exp2())
    if fmt is INT8:
        return QTensor(INT8, torch.randint(-128, 128, (n, k), dtype=torch.int8), scales)
    zeros = torch.randint(0, 17, tuple(scales.shape)).byte()
    return QTensor(fmt, torch.randint(0, 16, (n, k)).byte(), scales, zeros)


def linear_cases(m: int, n: int, k: int, dtype: torch.dtype, bias: torch.Tensor | None) -> Iterator[Case]:
    x, rest = torch.randn(m, k).to(dtype), {"n": n, "bias": bias}
    q = quantized(BF16, n, k)
    packed = CPU_VNNI_BF16.pack(q)
    yield Case("linear_bf16", {"x": x, **packed, **rest}, reference.linear_bf16(x, q.codes, bias), 0.01)
    q = quantized(INT8, n, k)
    assert q.scales is not None
    packed = CPU_VNNI_INT8.pack(q)
    int8 = {"x": x, "weight": packed["weight"], "scale": packed["weight_scale"], **rest}
    yield Case("linear_int8", int8, reference.linear_int8(x, q.codes, q.scales, bias))
    grouped = reference.linear_int8(x, q.codes, q.scales, bias, 64, 4)
    yield Case("linear_int8", {**int8, "activation_group": 64, "rotation": 4}, grouped)
    q = quantized(FP8, n, k)
    assert q.scales is not None
    packed = CPU_VNNI_FP8.pack(q)
    fp8 = {"x": x, "weight": packed["weight"], "scale": packed["weight_scale_inv"], **rest}
    yield Case("linear_fp8", fp8, reference.linear_fp8(x, q.codes, q.scales, bias), 0.01)
    q = quantized(INT4_BY_GROUP[64], n, k)
    assert q.scales is not None
    scales = q.scales.bfloat16().float()
    compact = {"x": x, **CPU_INT4_COMPACT.pack(QTensor(q.format, q.codes, scales)), **rest}
    eights = torch.full_like(scales, 8)
    expected = reference.linear_int4(x, q.codes, eights, scales, 64, bias, True)
    yield Case("linear_int4_compact", {**compact, "int8_activations": True}, expected)
    q = quantized(MXFP4, n, k)
    assert q.scales is not None
    mxfp4 = {"x": x, **CPU_MXFP4.pack(q), **rest}
    yield Case("linear_mxfp4", mxfp4, reference.linear_mxfp4(x, q.codes, q.scales, bias), 0.01)
    group = random.choice([32, 64, 128])
    q = quantized(INT4_BY_GROUP[group], n, k)
    assert q.scales is not None
    assert q.zeros is not None
    packed = CPU_VNNI_INT4.pack(q)
    names = {"weight": "weight", "zeros": "weight_zero_point", "scale": "weight_scale"}
    int4 = {"x": x, **{name: packed[key] for name, key in names.items()}, **rest}
    expected = reference.linear_int4(x, q.codes, q.zeros, q.scales, group, bias, True)
    yield Case("linear_int4", {**int4, "int8_activations": True}, expected)


def expert_cases(m: int, hidden: int, inner: int) -> Iterator[Case]:
    gate_up, down = quantized(INT8, 2 * inner, hidden), quantized(INT8, hidden, inner)
    assert gate_up.scales is not None
    assert down.scales is not None
    w13 = CPU_VNNI_INT8.pack(QTensor(INT8, gate_up.codes[None], gate_up.scales[None], parts=2))
    w2 = CPU_VNNI_INT8.pack(QTensor(INT8, down.codes[None], down.scales[None]))
    weights = {"w13": w13["weight"], "w2": w2["weight"], "inner": inner}
    weights |= {"w13_scale": w13["weight_scale"], "w2_scale": w2["weight_scale"]}
    x, ids, share = torch.randn(m, hidden), torch.zeros(m, 1, dtype=torch.int64), torch.rand(m, 1)

    def linear(q: QTensor) -> Callable[[torch.Tensor], torch.Tensor]:
        assert q.scales is not None
        return lambda rows, codes=q.codes, scales=q.scales: reference.linear_int8(rows, codes, scales)

    def expert(_number: int, rows: torch.Tensor) -> torch.Tensor:
        return reference_experts.expert(rows, linear(gate_up), linear(down), "silu")

    routed = {"x": x, "topk_weights": share, "topk_ids": ids, **weights, "activation": "silu"}
    yield Case("fused_experts", routed, reference_experts.fused_experts(x, share, ids, expert, 1.0))
    few = [quantized(MXFP4, *shape) for shape in ((2 * inner, hidden), (hidden, inner))]
    mxfp4 = [
        CPU_MXFP4.pack(replace(q, codes=q.codes[None], scales=q.scales[None], parts=parts))
        for q, parts in zip(few, (2, 1), strict=True)
    ]
    fp4 = {"w13": mxfp4[0]["weight"], "w2": mxfp4[1]["weight"], "inner": inner, "packing": "mxfp4"}

    def small(_number: int, rows: torch.Tensor) -> torch.Tensor:
        products = [lambda r, q=q: reference.linear_mxfp4(r, q.codes, q.scales) for q in few]
        return reference_experts.expert(rows, *products, "silu")

    routed = {"x": x, "topk_weights": share, "topk_ids": ids, **fp4}
    yield Case("fused_experts", routed, reference_experts.fused_experts(x, share, ids, small, 1.0), 0.01)
    ones = torch.ones(m, 1)
    shared = {"x": x, **weights, "activation": "silu"}
    yield Case("fused_mlp", shared, reference_experts.fused_experts(x, ones, ids, expert, 1.0))


def other_cases(m: int, n: int, k: int) -> Iterator[Case]:
    x, weight = torch.randn(m, k), torch.randn(k)
    norm = reference.rms_norm(x, weight, 1e-6)
    yield Case("rms_norm", {"x": x, "weight": weight, "epsilon": 1e-6}, norm, floats=("x", "weight"))
    q, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, m, 8), torch.randn(2, 2, m, 6)
    attended = reference.attend(q, key, value, 0.3).float()
    cache = {"q": q, "key": key, "value": value, "scale": 0.3}
    yield Case("attend", cache, attended, 1e-5, (), ("q", "key", "value"))
    stack = torch.stack([CPU_VNNI_BF16.pack(QTensor(BF16, torch.eye(n, k).bfloat16()))["weight"]] * 2)
    a = torch.randn(2, m, k).bfloat16()
    product = torch.nn.functional.pad(a, (0, max(n - k, 0)))[..., :n]
    yield Case("bmm", {"a": a, "weight": stack, "n": n}, product, 0.0, ("a",), ("a",))
    blocks = {"block_n": 1, "block_k": 0}
    yield Case("block_amax", {"weight": x, **blocks}, x.abs().amax(1, keepdim=True), 0.0, ("weight",), ("weight",))
    ones = torch.ones(m, 1)
    grid = {"scales": ones, "codes": "int8", **blocks}
    whole = torch.randint(-127, 128, (m, k)).float()
    yield Case("encode", {"weight": whole, **grid}, whole.to(torch.int8), 0.0, ("weight",))
    yield Case("squared_error", {"weight": whole, **grid}, torch.zeros(m, 1), 0.0, ("weight",))
    zero, squares = torch.zeros(m, dtype=torch.float64), whole.double().square().sum(1)
    quarter, most = zero + k / 4, whole.abs().amax(1).double()
    measured = torch.stack([zero, squares, quarter, zero, zero, zero, most], -1)[:, None]
    compared = {"weight": whole, "codes": whole.to(torch.int8), "scales": ones, "ideal": ones, "grid": "int8"}
    yield Case("code_errors", compared | blocks, measured, 0.0, ("weight",))
    scaled = {"codes": whole.to(torch.int8), "scales": ones, "kind": "int8", **blocks, "row0": 0}
    yield Case("scale_codes", scaled, whole, 0.0, ())
    pairs = torch.randint(0, 16, (m, 2 * k)).byte()
    joined = pairs[:, ::2] | pairs[:, 1::2] << 4
    yield Case("join_nibbles", {"codes": pairs}, joined, 0.0, (), ())
    yield Case("split_nibbles", {"joined": joined, "flip": 0}, pairs, 0.0, (), ())
    square = torch.randint(-128, 128, (1, 32, 4), dtype=torch.int8)
    words = {"codes": square, "columns": 4, "word": 4, "compensation": False}
    yield Case("pack_words", words, square, 0.0, (), ())
    codes, zeros = torch.zeros(1, 32, 32, dtype=torch.uint8), torch.zeros(1, 32, 1, dtype=torch.uint8)
    int4 = {"codes": codes, "zeros": zeros, "block_k": 32, "group": 32}
    yield Case("pack_int4", int4, torch.zeros(1, 1, 640, dtype=torch.uint8), 0.0, (), ())


def make_cases() -> list[Case]:
    cases = []
    for m in (1, 3, 40):
        bias = torch.randn(50) if m == 3 else None
        cases += list(linear_cases(m, 50, 100 + 28 * (m == 3), random.choice(FLOATS), bias))
        cases += list(expert_cases(m, 96, 40))
        cases += list(other_cases(m, 70, 64))
    return cases


def shrunk(t: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage was made too small below it."""
    t = t.clone()
    t.untyped_storage().resize_(random.choice([0, max(0, t.nbytes // 2 - 1)]))
    return t


def wrong_tensor(case: Case, name: str, t: torch.Tensor) -> Any:
    """Something that must be refused in the place of one tensor."""
    wrong: list[Callable[[], Any]] = [
        lambda: t.to("meta"),
        lambda: shrunk(t),
        lambda: "a string",
        lambda: t.to(torch.complex64) if t.dtype in FLOATS else t.to(torch.float64),
        lambda: t.to(torch.int64 if t.dtype != torch.int64 else torch.int16),
        lambda: t.to(torch.bool),
        lambda: t.to_sparse() if t.dtype in FLOATS and t.numel() > 1 else t.to("meta"),
    ]
    if "nibbles" not in case.operator:
        wrong.append(lambda: t.new_empty([0] * (t.dim() + 2)))
    if name not in case.strided and t.numel() > 1 and (t.dim() == 0 or max(t.shape) > 1):
        wrong.append(lambda: torch.stack([t, t], -1)[..., 0])
        wrong.append(lambda: t.flatten()[:1].expand(t.shape))
    if name in {"weight", "w13", "w2"} and case.operator.startswith(("linear", "fused", "shared", "bmm")):
        axis = random.randrange(t.dim())
        extra = random.choice([1, 32 if axis or case.operator != "bmm" else 1, 2**10])
        wrong.append(lambda: torch.cat([t.view(torch.uint8)] * 2, axis).view(t.dtype).contiguous())
        wrong.append(lambda: t.new_zeros([s + extra * (i == axis) for i, s in enumerate(t.shape)]))
        wrong.append(lambda: t.new_zeros([s * (i != axis) for i, s in enumerate(t.shape)]))
        wrong.append(lambda: t.flatten())
    if name in {"bias", "w13_bias", "scale", "w13_scale", "w2_scale", "zeros", "scales", "topk_ids", "topk_weights"}:
        wrong.append(lambda: t.new_zeros([s + 1 for s in t.shape]))
    return random.choice(wrong)()


def wrong_argument(case: Case, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return wrong_tensor(case, name, value)
    if isinstance(value, str):
        return random.choice(["", "nope", "int8\0", "\u202esilu", "x" * 10**5, 3, None])
    if isinstance(value, bool):
        return random.choice(["yes", torch.zeros(2)])
    if isinstance(value, int):
        most = [-1, -(2**63), 2**63 - 1, 2**62, 2**31, 2**40 + 1, 10**9, -32, None, "1", 2**70]
        return random.choice(most)
    return random.choice([None, "x", torch.zeros(3)])  # a float


def wrong_out(case: Case) -> torch.Tensor | str:
    """A tensor that the result must not be written to: of another shape or dtype, or within an input."""
    like = torch.empty_like(case.expected)
    shared = [t for t in case.arguments.values() if isinstance(t, torch.Tensor) and t.nbytes >= like.nbytes]
    if shared and random.random() < 0.6:
        raw = random.choice(shared).contiguous().view(torch.uint8).flatten()
        return raw[: like.nbytes].view(like.dtype).view(like.shape)
    return random.choice([
        like.double(),
        like[..., :-1].contiguous(),
        torch.stack([like, like], -1)[..., 0],
        like.flatten()[:1].expand(like.shape) if like.numel() > 1 else like.double(),
        shrunk(like),
        like.to("meta"),
        like[None],
        "out",
    ])


def wrong_call(case: Case) -> None:
    """Changes one argument so that the call must be refused, or several so that it may be."""
    arguments = dict(case.arguments)
    if case.has_out and random.random() < 0.2:
        with pytest.raises(Exception):  # noqa: B017, PT011  (any exception will do)
            case.call({**arguments, "out": wrong_out(case)}, "out")
        return
    optional = {name for name, value in arguments.items() if value is None}
    names = [name for name in arguments if name not in optional]
    changed = random.sample(names, 1 if random.random() < 0.8 else min(len(names), 3))
    for name in changed:
        arguments[name] = wrong_argument(case, name, arguments[name])
    if len(changed) == 1:
        told = {name: getattr(value, "shape", value) for name, value in arguments.items() if name in changed}
        try:
            case.call(arguments)
        except Exception:  # noqa: BLE001
            return
        pytest.fail(f"{case.operator} accepted {str(told)[:200]}")
    try:
        case.call(arguments)
    except Exception:  # noqa: BLE001
        return


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    random.seed(5)
    torch.manual_seed(5)
    return make_cases()


def test_wrong_calls_are_refused_and_right_ones_beside_them_are_right(cases: list[Case]) -> None:
    before = ops.isa()
    try:
        for _ in range(CALLS):
            ops.select_isa(random.choice(ISAS))
            wrong_call(random.choice(cases))
            case = random.choice(cases)
            if case.has_out and random.random() < 0.3:
                out = torch.empty_like(case.expected)
                case.call({**case.arguments, "out": out}, "out")
                case.check(out)
            else:
                case.check(case.call(case.arguments))
    finally:
        ops.select_isa(before)


def test_every_operator_has_a_case(cases: list[Case]) -> None:
    """Those without tensors apart: they are tested by name."""
    registered = {
        name.removeprefix("tilewright::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("tilewright::")
    }
    plain = {"isa", "isa_report", "select_isa", "select_blocking", "release_scratch", "guard_pages", "replaced_pages"}
    on_gpus = {name for name in registered if name.startswith("w4a8")}
    assert registered - plain - on_gpus == {case.operator for case in cases}


@pytest.mark.parametrize(
    "fields", [[0], [127], [-1, 100], [-1, -1, 2**40], [-1, -1, -1, 0], [-1] * 5 + [63], [-1] * 6 + [32], [-1] * 9]
)
def test_block_sizes_are_not_trusted(fields: list[int]) -> None:
    with pytest.raises(RuntimeError, match="it must be a multiple of|there are 8 fields"):
        torch.ops.tilewright.select_blocking(fields)


def test_rows_that_lie_at_one_place_do_not_overflow_products() -> None:
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="rows, which is too many"):
        torch.ops.tilewright.linear_bf16(torch.zeros(1, 32).expand(2**57, 32), weight, 32)
    key = torch.zeros(1, 1, 1, 2).expand(1, 1, 2**60, 2)
    with pytest.raises(RuntimeError, match="too large"):
        torch.ops.tilewright.attend(torch.zeros(1, 1, 1, 2).expand(1, 2**20, 1, 2), key, key, 1.0)


def test_a_first_expert_at_the_end_of_the_integers(cases: list[Case]) -> None:
    case = next(case for case in cases if case.operator == "fused_experts")
    y = case.call({**case.arguments, "first_expert": 2**63 - 1})
    assert torch.equal(y, torch.zeros_like(y))
