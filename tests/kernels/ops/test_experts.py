"""Expert layers against a plain loop over experts, on every instruction set there is.

Integer kinds must give the reference's bits, float kinds its values within the rounding of their products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.formats import BF16, FP8, INT4_BY_GROUP, INT8, MXFP4
from tilewright.kernels.layouts.cpu_float import CPU_VNNI_BF16, CPU_VNNI_FP8
from tilewright.kernels.layouts.cpu_int4 import CPU_VNNI_INT4
from tilewright.kernels.layouts.cpu_int8 import CPU_VNNI_INT8
from tilewright.kernels.layouts.cpu_mxfp4 import CPU_MXFP4
from tilewright.kernels.ops import experts as ops_experts
from tilewright.kernels.ops import reference, reference_experts
from tilewright.kernels.tensors import QTensor

KINDS = ["bf16", "int8", "fp8", "int4-g32", "int4-g128", "int4-g64-bf16", "mxfp4"]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@dataclass(frozen=True)
class Weights:
    """A random stack [E, N, K], packed, and each of its matrices as a function."""

    kind: str
    q: QTensor
    packed: dict[str, torch.Tensor]
    bias: torch.Tensor | None

    def __call__(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[expert]
        q, codes = self.q, self.q.codes[expert]
        if self.kind == "bf16":
            return reference.linear_bf16(x, codes, bias)
        assert q.scales is not None
        scales = q.scales[expert]
        if self.kind == "int8":
            return reference.linear_int8(x, codes, scales, bias)
        if self.kind == "fp8":
            parts = zip(codes.chunk(q.parts), scales.chunk(q.parts), strict=True)
            y = torch.cat([reference.linear_fp8(x, *part) for part in parts], -1)
            return y if bias is None else y + bias
        if self.kind == "mxfp4":
            return reference.linear_mxfp4(x, codes, scales, bias)
        assert q.zeros is not None
        int8_activations = not self.kind.endswith("bf16")
        return reference.linear_int4(x, codes, q.zeros[expert], scales, q.format.block_k, bias, int8_activations)


def make_weights(kind: str, e: int, n: int, k: int, parts: int, bias: bool) -> Weights:
    b = torch.randn(e, n) if bias else None
    if kind == "bf16":
        q = QTensor(BF16, torch.randn(e, n, k).bfloat16() * k**-0.5, parts=parts)
        return Weights(kind, q, CPU_VNNI_BF16.pack(q), b)
    if kind == "fp8":
        codes = (torch.randn(e, n, k) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = torch.rand(e, FP8.scale_rows(n, parts), FP8.scale_columns(k)) * 0.02 * k**-0.5 + 1e-4
        q = QTensor(FP8, codes, scales, parts=parts)
        return Weights(kind, q, CPU_VNNI_FP8.pack(q), b)
    if kind == "int8":
        codes = torch.randint(-128, 128, (e, n, k), dtype=torch.int8)
        q = QTensor(INT8, codes, (torch.rand(e, n, 1) * 0.02 + 1e-4) * k**-0.5, parts=parts)
        return Weights(kind, q, CPU_VNNI_INT8.pack(q), b)
    if kind == "mxfp4":
        scales = torch.randint(-2, 2, (e, n, MXFP4.scale_columns(k))).float().exp2() * 2.0 ** round(
            -math.log2(k) / 2 - 1
        )
        q = QTensor(MXFP4, torch.randint(0, 16, (e, n, k), dtype=torch.uint8), scales, parts=parts)
        return Weights(kind, q, CPU_MXFP4.pack(q), b)
    fmt = INT4_BY_GROUP[int(kind.split("-")[1][1:])]
    codes = torch.randint(0, 16, (e, n, k), dtype=torch.uint8)
    grid = (e, n, fmt.scale_columns(k))
    q = QTensor(fmt, codes, (torch.rand(grid) * 0.2 + 1e-4) * k**-0.5, torch.randint(0, 17, grid).byte(), parts)
    return Weights(kind, q, CPU_VNNI_INT4.pack(q), b)


@dataclass(frozen=True)
class Layer:
    """Experts of one kind with the call that runs them and the one that states the result."""

    kind: str
    w13: Weights
    w2: Weights
    options: dict[str, Any]

    @property
    def inner(self) -> int:
        return self.w2.q.shape[-1]

    @property
    def exact(self) -> bool:
        return self.kind.startswith("int") and not self.kind.endswith("bf16")

    def arguments(self) -> dict[str, Any]:
        given = {"inner": self.inner, "int8_activations": not self.kind.endswith("bf16"), **self.options}
        given["packing"] = self.kind if self.kind == "mxfp4" else ""
        for name, w in (("w13", self.w13), ("w2", self.w2)):
            given |= {
                name: w.packed["weight"],
                f"{name}_scale": w.packed.get("weight_scale", w.packed.get("weight_scale_inv")),
                f"{name}_zeros": w.packed.get("weight_zero_point"),
                f"{name}_bias": w.bias,
            }
        return given

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return ops_experts.fused_experts(x, weights, ids, **{**self.arguments(), **options})

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        gate = {name: self.options[name] for name in ("alpha", "limit") if name in self.options}
        activation = self.options.get("activation", "silu")
        w13, w2 = (lambda rows, w=w: w(number, rows) for w in (self.w13, self.w2))
        return reference_experts.expert(x, w13, w2, activation, **gate)

    def reference(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        scale = self.options.get("routed_scale", 1.0)
        return reference_experts.fused_experts(x, weights, ids, self.expert, scale)


def make_layer(kind: str, e: int, hidden: int, inner: int, bias: bool = False, **options: Any) -> Layer:
    w13 = make_weights(kind, e, 2 * inner, hidden, 2, bias)
    return Layer(kind, w13, make_weights(kind, e, hidden, inner, 1, bias), options)


def route(tokens: int, top_k: int, e: int, missing: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random choices, different for each token, some of them -1."""
    ids = torch.rand(tokens, e).argsort(-1)[:, :top_k].contiguous()
    ids[torch.rand(tokens, top_k) < missing] = -1
    return torch.rand(tokens, top_k), ids


def check(layer: Layer, y: torch.Tensor, expected: torch.Tensor) -> None:
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    if layer.exact:
        assert torch.equal(y, expected), (y.double() - expected.double()).abs().max()
    elif y.numel() and expected.count_nonzero():
        # Sums of K products in another order move a value by little, which can move the bf16 between the products by
        # one unit, 2^-8, here and there.
        error = (y.double() - expected.double()).norm() / expected.double().norm()
        assert error < (2**-9 if y.dtype != torch.bfloat16 else 2**-8), error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(100, 96), (160, 33)])
def test_odd_sizes(isa: str, kind: str, hidden: int, inner: int) -> None:
    torch.manual_seed(hidden)
    layer = make_layer(kind, 5, hidden, inner, bias=hidden == 100)
    for m in (0, 1, 2, 7, 40):
        x = torch.randn(m, hidden).to(DTYPES[m % 3])
        weights, ids = route(m, 3, 5)
        check(layer, layer(x, weights, ids), layer.reference(x, weights, ids))


@pytest.mark.parametrize("activation", ops_experts.ACTIVATIONS)
def test_activations(isa: str, activation: str) -> None:
    torch.manual_seed(1)
    layer = make_layer("int8", 3, 64, 64, bias=True, activation=activation, alpha=1.3, limit=1.1, routed_scale=2.5)
    x = 4 * torch.randn(20, 64)
    weights, ids = route(20, 2, 3)
    check(layer, layer(x, weights, ids), layer.reference(x, weights, ids))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), m=st.integers(1, 30), e=st.integers(1, 9), data=st.data())
def test_any_routing(isa: str, kind: str, seed: int, m: int, e: int, data: st.DataObject) -> None:
    """Empty experts, experts chosen twice by one token, crowded experts, tokens that go nowhere."""
    torch.manual_seed(seed)
    layer = make_layer(kind, e, 40, 48)
    top_k = data.draw(st.integers(1, 4))
    flat = data.draw(st.lists(st.integers(-1, e - 1), min_size=m * top_k, max_size=m * top_k))
    ids = torch.tensor(flat, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))).reshape(m, top_k)
    x, weights = torch.randn(m, 40), torch.randn(m, top_k)
    check(layer, layer(x, weights, ids), layer.reference(x, weights, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_the_batch_or_the_threads(isa: str, kind: str) -> None:
    torch.manual_seed(4)
    layer = make_layer(kind, 4, 288, 160)
    m = 60 if isa in {"portable", "amx_emu"} else 330  # several tiles of rows for an expert
    x = torch.randn(m, 288).bfloat16()
    weights, ids = route(m, 2, 4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = layer(x, weights, ids)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(layer(x, weights, ids), whole)
        for rows in ([0], [m - 1], [7, 8], list(range(3, 20))):
            assert torch.equal(layer(x[rows], weights[rows], ids[rows]), whole[rows])
        swapped = layer(x, weights.flip(1).contiguous(), ids.flip(1).contiguous())
        assert torch.equal(swapped, whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_every_element_of_the_result_is_written(isa: str, kind: str) -> None:
    """In torch's deterministic mode new memory is filled with NaN; tokens that go nowhere must still become zeros."""
    torch.manual_seed(10)
    layer, one = make_layer(kind, 3, 100, 33), make_layer(kind, 1, 100, 33)
    x = torch.randn(21, 100).bfloat16()
    weights, ids = route(21, 2, 3)
    ids[4] = -1
    expected = layer(x, weights, ids), layer(x, weights, torch.full_like(ids, -1)), shared(one, x)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        poisoned = layer(x, weights, ids), layer(x, weights, torch.full_like(ids, -1)), shared(one, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(poisoned, expected, strict=True))
    assert not poisoned[0][4].any()
    assert not poisoned[1].any()


def test_more_tokens_than_one_pass() -> None:
    torch.manual_seed(5)
    layer = make_layer("int8", 2, 32, 32)
    x = torch.randn(2100, 32)
    weights, ids = route(2100, 1, 2)
    whole = layer(x, weights, ids)
    assert torch.equal(whole, torch.cat([layer(x[i], weights[i], ids[i]) for i in torch.arange(2100).split(1000)]))
    check(layer, whole[2040:2060], layer.reference(x[2040:2060], weights[2040:2060], ids[2040:2060]))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_add_up(isa: str, kind: str) -> None:
    """Each part of a stack takes the choices that are its own."""
    torch.manual_seed(6)
    layer = make_layer(kind, 6, 64, 64, bias=True)
    x = torch.randn(9, 64)
    weights, ids = route(9, 3, 6)
    total = torch.zeros(9, 64)
    for first in (0, 2, 4):
        mine = {
            name: value[first : first + 2] if isinstance(value, torch.Tensor) else value
            for name, value in layer.arguments().items()
        }
        total += ops_experts.fused_experts(x, weights, ids, **mine, first_expert=first)
    assert torch.allclose(total, layer(x, weights, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_with_its_token_and_infinity_is_not_made(isa: str, kind: str) -> None:
    torch.manual_seed(7)
    layer = make_layer(kind, 3, 64, 64)
    x = torch.randn(6, 64)
    x[2, 5] = torch.nan
    x[4] *= 1e4
    weights, ids = route(6, 2, 3, missing=0)
    y = layer(x, weights, ids)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4, 5]].isfinite().all()


def shared(layer: Layer, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """The first expert of a stack, its tensors without the axis of experts."""
    mine = {name: v[0] if isinstance(v, torch.Tensor) else v for name, v in layer.arguments().items()}
    return ops_experts.fused_mlp(x, **mine, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_expert(isa: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    layer = make_layer(kind, 1, 100, 40, bias=dtype == torch.float32)
    for m in (0, 1, 19):
        x, gate, fused = torch.randn(m, 100).to(dtype), torch.randn(m, 1).to(dtype), torch.randn(m, 100).to(dtype)
        before = x.clone()
        y = layer.expert(0, x)
        given = {"gate": gate, "fused_out": fused, "fused_scale": 2.5}
        for names in ((), ("gate",), ("fused_out", "fused_scale"), tuple(given)):
            options = {name: given[name] for name in names}
            expected = reference_experts.fused_mlp(y, dtype, **options)
            check(layer, shared(layer, x, **options), expected)
        assert torch.equal(x, before)


def test_routed_and_shared_experts_share_an_input() -> None:
    """A gated shared expert beside routed ones: the input survives both, a gate of zero halves the shared part."""
    torch.manual_seed(9)
    routed, one = make_layer("int8", 4, 64, 32), make_layer("int8", 1, 64, 48)
    x = torch.randn(9, 64).bfloat16()
    before = x.clone()
    weights, ids = route(9, 2, 4)
    gate = torch.randn(9, 1)
    routed_y = routed(x, weights, ids)
    both = shared(one, x, fused_out=routed_y, gate=gate)
    assert torch.equal(x, before)
    expected = reference_experts.sigmoid(gate) * one.expert(0, x) + routed.reference(x, weights, ids).float()
    assert torch.equal(both, expected.bfloat16())
    wide = x.float()
    assert torch.equal(shared(one, wide, gate=torch.zeros(9, 1)), shared(one, wide) / 2)


def test_refusals_name_the_value_and_the_rule() -> None:
    layer = make_layer("int8", 2, 64, 32)
    x = torch.randn(1, 64)
    weights, ids = route(1, 2, 2, missing=0)
    with pytest.raises(RuntimeError, match="there is no activation `relu`; known are silu, gelu"):
        layer(x, weights, ids, activation="relu")
    with pytest.raises(RuntimeError, match=r"w13 is \[2, 64, 68\], it must be \[2, 128, 68\]"):
        layer(x, weights, ids, inner=64)
    with pytest.raises(RuntimeError, match="w2_scale is missing"):
        layer(x, weights, ids, w2_scale=None)
    with pytest.raises(RuntimeError, match=r"topk_weights is \[1, 1\], topk_ids is \[1, 2\]"):
        layer(x, weights[:, :1], ids)
    with pytest.raises(RuntimeError, match=r"gate is \[2, 1\], it must be \[1, 1\]"):
        shared(layer, x, gate=torch.zeros(2, 1))
    with pytest.raises(RuntimeError, match="clamped_swiglu needs a finite alpha and a positive limit"):
        layer(x, weights, ids, activation="clamped_swiglu", limit=0.0)
