"""The operators against reference.py and the recorded outputs of other kernels, on every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewright.kernels import ops
from tilewright.kernels.formats import BF16, FP8, INT4_BY_GROUP, INT8, MXFP4
from tilewright.kernels.formats.mxfp4 import from_e8m0
from tilewright.kernels.layouts.cpu_float import CPU_VNNI_BF16, CPU_VNNI_FP8
from tilewright.kernels.layouts.cpu_int4 import CPU_VNNI_INT4
from tilewright.kernels.layouts.cpu_int8 import CPU_VNNI_INT8
from tilewright.kernels.layouts.cpu_mxfp4 import CPU_MXFP4
from tilewright.kernels.ops import reference
from tilewright.kernels.tensors import QTensor

GOLDEN = load_file(Path(__file__).parents[2] / "golden" / "linear_io.safetensors")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["bf16", "fp8", "int8", "int4-g32", "int4-g64", "int4-g128", "int4-g32-bf16", "int4-g64-bf16", "int4-g128-bf16"]
KINDS.append("mxfp4")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Layer:
    """A random weight of one kind, packed, with the call that runs it and the one that states the result."""

    kind: str
    n: int
    k: int
    codes: torch.Tensor
    scale: torch.Tensor | None
    zeros: torch.Tensor | None
    packed: dict[str, torch.Tensor]
    bias: torch.Tensor | None

    @property
    def exact(self) -> bool:
        return self.kind.startswith("int") and not self.kind.endswith("bf16")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.packed["weight"]
        if self.kind == "bf16":
            return ops.linear_bf16(x, weight, self.n, self.bias)
        if self.kind == "fp8":
            return ops.linear_fp8(x, weight, self.packed["weight_scale_inv"], self.n, self.bias)
        if self.kind == "int8":
            return ops.linear_int8(x, weight, self.packed["weight_scale"], self.n, self.bias)
        if self.kind == "mxfp4":
            return ops.linear_mxfp4(x, weight, self.n, self.bias)
        zeros, scale = self.packed["weight_zero_point"], self.packed["weight_scale"]
        return ops.linear_int4(x, weight, zeros, scale, self.n, self.bias, not self.kind.endswith("bf16"))

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "bf16":
            return reference.linear_bf16(x, self.codes, self.bias)
        assert self.scale is not None
        if self.kind == "fp8":
            return reference.linear_fp8(x, self.codes, self.scale, self.bias)
        if self.kind == "int8":
            return reference.linear_int8(x, self.codes, self.scale, self.bias)
        if self.kind == "mxfp4":
            return reference.linear_mxfp4(x, self.codes, self.scale, self.bias)
        assert self.zeros is not None
        group, int8_activations = int(self.kind.split("-")[1][1:]), not self.kind.endswith("bf16")
        return reference.linear_int4(x, self.codes, self.zeros, self.scale, group, self.bias, int8_activations)


def make_layer(kind: str, n: int, k: int, bias: bool = False) -> Layer:
    b = torch.randn(n) if bias else None
    if kind == "bf16":
        codes = torch.randn(n, k).bfloat16()
        return Layer(kind, n, k, codes, None, None, CPU_VNNI_BF16.pack(QTensor(BF16, codes)), b)
    if kind == "fp8":
        codes = (torch.randn(n, k) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.rand(FP8.scale_rows(n), FP8.scale_columns(k)) * 0.01 + 1e-4
        return Layer(kind, n, k, codes, scale, None, CPU_VNNI_FP8.pack(QTensor(FP8, codes, scale)), b)
    scale = torch.rand(n, 1) * 0.01 + 1e-4
    if kind == "int8":
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        return Layer(kind, n, k, codes, scale, None, CPU_VNNI_INT8.pack(QTensor(INT8, codes, scale)), b)
    if kind == "mxfp4":
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        scale = torch.randint(-9, -4, (n, MXFP4.scale_columns(k))).float().exp2()
        return Layer(kind, n, k, codes, scale, None, CPU_MXFP4.pack(QTensor(MXFP4, codes, scale)), b)
    group = int(kind.split("-")[1][1:])
    fmt = INT4_BY_GROUP[group]
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 17, (n, fmt.scale_columns(k)), dtype=torch.uint8)
    scale = torch.rand(n, fmt.scale_columns(k)) * 0.01 + 1e-4
    return Layer(kind, n, k, codes, scale, zeros, CPU_VNNI_INT4.pack(QTensor(fmt, codes, scale, zeros)), b)


def check(layer: Layer, x: torch.Tensor, y: torch.Tensor) -> None:
    expected = layer.reference(x)
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    if layer.exact:
        assert torch.equal(y, expected), (y - expected).abs().max()
    elif y.numel():
        unit = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[x.dtype]
        error = (y.double() - expected.double()).norm() / expected.double().norm()
        assert error < unit, error
        # and no single element is off by more than rounding and the sum of the products can explain
        bound = x.float().abs().amax(-1, keepdim=True) * layer.k**0.5
        assert ((y - expected).abs().double() <= 4 * unit * (expected.abs() + bound).double()).all()


@pytest.mark.parametrize("size", ["N256.K384", "N320.K512"])
@pytest.mark.parametrize("m", [1, 7, 33])
def test_recorded_outputs(isa: str, size: str, m: int) -> None:
    """Integers equal what engines give today, floats within their rounding."""
    g = {key.removeprefix(f"lin.{size}."): value for key, value in GOLDEN.items() if key.startswith(f"lin.{size}.")}
    x, n, bias = g[f"x.M{m}"], int(size.split(".")[0][1:]), g["bias"]
    int8 = (g["int8.packed"], g["int8.scale"], n)
    assert torch.equal(ops.linear_int8(x, *int8), g[f"out.int8.M{m}"])
    assert torch.equal(ops.linear_int8(x, *int8, bias), g[f"out.int8_bias.M{m}"])
    assert torch.equal(ops.linear_int4(x, g["int4.packed"], g["int4.pz"], g["int4.ps"], n), g[f"out.int4.M{m}"])
    fp8 = (g["fp8.packed"], g["fp8.scale"], n)
    pairs = [
        (ops.linear_bf16(x, g["bf16.packed"], n), g[f"out.bf16.M{m}"]),
        (ops.linear_bf16(x, g["bf16.packed"], n, bias), g[f"out.bf16_bias.M{m}"]),
        (ops.linear_fp8(x, *fp8), g[f"out.fp8.M{m}"]),
        (ops.linear_fp8(x, *fp8, bias), g[f"out.fp8_bias.M{m}"]),
        (ops.linear_int4(x, g["int4.packed"], g["int4.pz"], g["int4.ps"], n, None, False), g[f"out.int4.M{m}"]),
    ]
    for y, expected in pairs[:-1]:
        assert (y.float() - expected.float()).norm() / expected.float().norm() < 3e-3
    y, expected = pairs[-1]  # the record quantized its activations
    assert (y.float() - expected.float()).norm() / expected.float().norm() < 2e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [96, 100, 640])
def test_odd_sizes(isa: str, kind: str, k: int) -> None:
    torch.manual_seed(k)
    for n in (16, 33, 40, 48, 130):
        layer = make_layer(kind, n, k, bias=n != 48)
        for m in (0, 1, 17, 33) if isa == "amx_emu" else (0, 1, 2, 3, 5, 17, 33):
            x = torch.randn(m, k).to(DTYPES[(m + n) % 3])
            check(layer, x, layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_long_and_many(isa: str, kind: str) -> None:
    """Several chunks of K, several tasks of rows."""
    torch.manual_seed(3)
    layer = make_layer(kind, 65, 1248, bias=True)
    for m in (1, 34) if isa in {"portable", "amx_emu"} else (1, 34, 391):
        x = torch.randn(m, layer.k).bfloat16()
        check(layer, x, layer(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cut", [[128, 128, 0, 96, 3, 0, 64, 2], [256, 256, 0, 64, 1, 512, 0, 1], [-1, -1, 0, 256, 8, 4096, 256, 2]]
)
def test_any_blocking(isa: str, kind: str, cut: list[int]) -> None:
    """Chunks, tasks and turns of every size, groups of rows and blocks that have no partner to take turns with."""
    torch.manual_seed(9)
    layer = make_layer(kind, 97, 480, bias=True)
    torch.ops.tilewright.select_blocking(cut)
    try:
        for m in (8, 64, 107):
            x = torch.randn(m, layer.k).bfloat16()
            check(layer, x, layer(x))
    finally:
        torch.ops.tilewright.select_blocking([])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(isa: str, kind: str) -> None:
    torch.manual_seed(4)
    layer = make_layer(kind, 144, 1120)
    x = torch.randn(75, layer.k).bfloat16()
    whole = layer(x)
    for rows in ([0], [49], [7, 8], list(range(2, 11)), list(range(3, 20)), list(range(1, 34))):
        assert torch.equal(layer(x[rows]), whole[rows])
    torch.set_num_threads(3)
    assert torch.equal(layer(x), whole)
    assert torch.equal(layer(x[:1]), whole[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_give_the_bias(isa: str, kind: str) -> None:
    layer = make_layer(kind, 40, 128, bias=True)
    x = torch.randn(3, 128)
    x[1] = 0
    assert layer.bias is not None
    assert torch.equal(layer(x)[1], layer.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_large_half_activations_stay_finite(isa: str, kind: str) -> None:
    torch.manual_seed(5)
    layer = make_layer(kind, 32, 256)
    x = (torch.randn(2, 256) * 2e4).clamp(-65504, 65504)
    wide, half = layer(x.half().float()), layer(x.half())
    assert wide.isfinite().all()
    assert torch.equal(half, wide.half())  # inside nothing is narrower than fp32 or bf16


def test_every_fp8_code(isa: str) -> None:
    """Row c of the weight holds code c: the product with a unit vector is its value, NaN where the code is NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None].repeat(1, 32)
    packed = CPU_VNNI_FP8.pack(QTensor(FP8, codes, torch.ones(2, 1)))
    for m in (1, 20):
        x = torch.zeros(m, 32)
        x[:, 5] = 1
        y = ops.linear_fp8(x, packed["weight"], torch.ones(2, 1), 256)
        assert torch.equal(y.nan_to_num(nan=1e9), codes[:, 5].float().nan_to_num(nan=1e9).expand(m, -1))


@pytest.mark.parametrize("rows", [16, 32])
def test_every_mxfp4_code_and_scale(isa: str, rows: int) -> None:
    """So many rows have each scale, alone in their block or not: products with a unit vector are the values of codes.

    What bf16 does not reach is infinite, the scale 255 makes a NaN of every code, and subnormal values may be zero.
    """
    n = 256 * rows
    stored = torch.arange(256, dtype=torch.uint8).repeat_interleave(rows)
    own = torch.arange(16, dtype=torch.uint8).repeat(n // 16)
    expected = MXFP4.decode(own) * from_e8m0(stored)
    tiny = (expected.abs() < 2.0**-126) & (expected != 0)
    assert int(tiny.sum()) == 2 * (3 + 1) * rows // 16  # 1/2, 1 and 3/2 under 2^-127, 1/2 under 2^-126
    for column in (0, 37, 95):
        codes = torch.zeros(n, 96, dtype=torch.uint8)
        codes[:, column] = own
        packed = CPU_MXFP4.pack(QTensor(MXFP4, codes, torch.ones(n, 3)))["weight"]
        packed[..., :64].view(n // 32, 2, 2, 32).copy_(stored.view(n // 32, 1, 1, 32))
        for m in (1, 3, 40):
            x = torch.zeros(m, 96)
            x[:, column] = 1
            y = ops.linear_mxfp4(x, packed, n)
            same = (y == expected) | (y.isnan() & expected.isnan()) | (tiny & (y == 0))
            assert same.all(), (stored[~same[0]], own[~same[0]])


def test_mxfp4_gives_the_same_bits_everywhere_but_on_tiles() -> None:
    torch.manual_seed(11)
    layer = make_layer("mxfp4", 70, 480, bias=True)
    x = (torch.randn(37, 480) * torch.randn(37, 480).mul(4).exp2()).bfloat16()
    results, before = {}, ops.isa()
    try:
        for status in ops.kernel_report():
            if status.available and not status.name.startswith("amx"):
                ops.select_isa(status.name)
                results[status.name] = layer(x)
    finally:
        ops.select_isa(before)
    first, *others = results.values()
    assert all(torch.equal(first, y) for y in others), list(results)
    check(layer, x, first)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_shows(isa: str, kind: str) -> None:
    layer = make_layer(kind, 32, 128)
    x = torch.randn(3, 128)
    x[1, 77] = torch.nan
    y = layer(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("n", [16, 48])
def test_last_block_of_sixteen_rows(isa: str, kind: str, n: int) -> None:
    """What engines pack for N % 32 == 16: the last block is [K/2][16][2]."""
    torch.manual_seed(n)
    layer = make_layer(kind, n, 160)
    bits = layer.codes.view(torch.int16 if kind == "bf16" else torch.uint8)
    blocks = [bits[i : i + 32] for i in range(0, n, 32)]
    flat = torch.cat([b.reshape(b.shape[0], -1, 2).transpose(0, 1).reshape(-1) for b in blocks])
    packed = {**layer.packed, "weight": flat.reshape(n, 160).view(layer.codes.dtype)}
    narrow = Layer(kind, n, 160, layer.codes, layer.scale, None, packed, None)
    x = torch.randn(19, 160).bfloat16()
    assert torch.equal(narrow(x), layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_any_arrangement(isa: str, kind: str) -> None:
    torch.manual_seed(6)
    layer = make_layer(kind, 48, 128)
    x = torch.randn(2, 3, 256)
    assert torch.equal(layer(x[..., 64:192]), layer(x[..., 64:192].reshape(6, 128)).view(2, 3, 48))
    wide = torch.randn(128, 7)
    assert torch.equal(layer(wide.T), layer(wide.T.contiguous()))
    assert torch.equal(layer(x[0, 0, :128]), layer(x[0, :1, :128])[0])
    assert torch.equal(layer(x[:1, 0, :128].expand(5, -1)), layer(x[:1, 0, :128].repeat(5, 1)))
    assert layer(x[:, :0, :128]).shape == (2, 0, 48)
