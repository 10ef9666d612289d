"""CPU layouts: every element where the formula says, padding that does not show, and an exact inverse."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.errors import LayoutError
from tilewright.kernels.formats import BF16, FORMATS, FP8, INT4_G32, INT8, MXFP4, WeightFormat
from tilewright.kernels.formats.integer import IntegerFormat
from tilewright.kernels.formats.mxfp4 import from_e8m0
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.layouts.cpu_blocks import row_unit
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor, TensorSpec

CPU = [layout for name, layout in LAYOUTS.items() if name.startswith("cpu-")]
PAIRS = [(layout, fmt) for layout in CPU for fmt in FORMATS.values() if not layout.accepts(fmt, (32, 32))]


def random_weight(
    fmt: WeightFormat, shape: tuple[int, ...], parts: int, seed: int, *, asymmetric: bool = False
) -> QTensor:
    """Every code that the format has, scales anywhere, zero points if asked for."""
    generator = torch.Generator().manual_seed(seed)
    *lead, n, k = shape
    high = 16 if fmt.bits == 4 else 2 ** (8 * fmt.code_dtype.itemsize)
    bits = torch.randint(0, high, shape, generator=generator)
    codes = bits.to(torch.int16).view(fmt.code_dtype) if fmt.bits == 16 else bits.to(torch.uint8).view(fmt.code_dtype)
    grid = (*lead, fmt.scale_rows(n, parts), fmt.scale_columns(k)) if fmt.has_scales else None
    scales = (torch.rand(grid, generator=generator) + 0.01).bfloat16().float() if grid else None
    if scales is not None and fmt is MXFP4:
        scales = from_e8m0(torch.randint(0, 255, scales.shape, generator=generator, dtype=torch.uint8))
    zeros = None
    if grid and asymmetric:
        zeros = torch.randint(0, 16, grid, generator=generator, dtype=torch.uint8)
        zeros.flatten()[0] = 3  # not 8 throughout, which is another way of saying None
    return QTensor(fmt, codes, scales, zeros, parts)


def same(a: QTensor, b: QTensor) -> bool:
    def equal(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))

    return all(equal(x, y) for x, y in ((a.codes, b.codes), (a.scales, b.scales), (a.zeros, b.zeros)))


@pytest.mark.parametrize(("layout", "fmt"), PAIRS, ids=lambda value: value.id)
@given(data=st.data())
@settings(max_examples=25)
def test_unpack_is_the_inverse(layout, fmt, data: st.DataObject) -> None:
    parts = data.draw(st.sampled_from([1, 2, 3]))
    n = parts * data.draw(st.integers(1, 70))
    k = data.draw(st.integers(1, 300))
    shape = (n, k) if data.draw(st.booleans()) else (data.draw(st.integers(1, 3)), n, k)
    asymmetric = layout.id == "cpu-vnni-int4" and data.draw(st.booleans())
    q = random_weight(fmt, shape, parts, data.draw(st.integers(0, 2**30)), asymmetric=asymmetric)
    assert layout.accepts(fmt, shape, parts) is None
    before = q.codes.clone()
    packed = layout.pack(q)
    assert {suffix: TensorSpec.of(tensor) for suffix, tensor in packed.items()} == layout.specs(fmt, shape, parts)
    assert all(tensor.is_contiguous() for tensor in packed.values())
    assert torch.equal(q.codes.view(torch.uint8), before.view(torch.uint8))
    assert same(layout.unpack(packed, fmt, shape, parts), q)


@pytest.mark.parametrize(("layout", "fmt"), PAIRS, ids=lambda value: value.id)
def test_a_part_is_packed_as_if_alone(layout, fmt) -> None:
    whole = random_weight(fmt, (2, 80, 70), 2, 5)
    packed = layout.pack(whole)
    for expert, part in itertools.product(range(2), range(2)):
        rows = None if whole.scales is None else whole.scales.shape[1] // 2
        alone = QTensor(
            fmt,
            whole.codes[expert, part * 40 : part * 40 + 40],
            None if whole.scales is None else whole.scales[expert, part * rows : (part + 1) * rows],
        )
        for suffix, tensor in layout.pack(alone).items():
            of_both = packed[suffix][expert]
            half = of_both.shape[0] // 2
            mine = of_both[part * half : (part + 1) * half]
            assert torch.equal(mine.contiguous().view(torch.uint8), tensor.view(torch.uint8)), suffix


@pytest.mark.parametrize(("layout", "fmt"), PAIRS, ids=lambda value: value.id)
@given(data=st.data())
@settings(max_examples=15)
def test_whole_blocks_of_rows_are_packed_as_if_alone(layout, fmt, data: st.DataObject) -> None:
    """`ModuleSpec.take`, down to the padded end of the weight and its bias, which is not padded."""
    unit, k = row_unit(fmt), data.draw(st.integers(1, 200))
    blocks = data.draw(st.integers(1, 4))
    n = (blocks - 1) * unit + data.draw(st.integers(1, unit))
    start = data.draw(st.integers(0, blocks - 1))
    stop = data.draw(st.integers(start + 1, blocks))
    rows = slice(start * unit, min(stop * unit, n))
    q = random_weight(fmt, (n, k), 1, data.draw(st.integers(0, 2**30)))
    grid = slice(rows.start // fmt.block_n, -(-rows.stop // fmt.block_n)) if fmt.has_scales else slice(None)
    alone = layout.pack(QTensor(fmt, q.codes[rows], None if q.scales is None else q.scales[grid]))
    bias = torch.arange(n, dtype=torch.float32)
    spec = ModuleSpec(layout, fmt, (n, k), bias_dtype=torch.float32)
    taken = spec.take(layout.pack(q) | {"bias": bias}, rows)
    assert torch.equal(taken.pop("bias"), bias[rows])
    assert spec.with_rows(rows).shape == (rows.stop - rows.start, k)
    assert taken.keys() == alone.keys()
    for suffix, tensor in alone.items():
        assert torch.equal(taken[suffix].contiguous().view(torch.uint8), tensor.view(torch.uint8)), suffix


@pytest.mark.parametrize(("layout", "fmt"), PAIRS, ids=lambda value: value.id)
def test_views_of_unaligned_memory_pack_the_same(layout, fmt) -> None:
    q = random_weight(fmt, (33, 64), 1, 6)
    size = fmt.code_dtype.itemsize
    buffer = bytearray(size) + q.codes.flatten().view(torch.uint8).numpy().tobytes()
    view = torch.frombuffer(buffer, dtype=fmt.code_dtype, offset=size, count=33 * 64).reshape(33, 64)
    packed = layout.pack(QTensor(fmt, view, q.scales))["weight"]
    assert torch.equal(packed.view(torch.uint8), layout.pack(q)["weight"].view(torch.uint8))


def test_int8_addresses() -> None:
    n, k = 64, 64
    codes = torch.arange(n * k).remainder(251).sub(125).to(torch.int8).reshape(n, k)
    packed = LAYOUTS["cpu-vnni-int8"].pack(QTensor(INT8, codes, torch.arange(1.0, n + 1).reshape(n, 1)))
    flat = packed["weight"].flatten()
    for row, column in itertools.product(range(n), range(k)):
        address = row // 32 * 32 * (k + 4) + column // 4 * 128 + row % 32 * 4 + column % 4
        assert flat[address] == codes[row, column]
    for row in range(n):
        at = row // 32 * 32 * (k + 4) + 32 * k + row % 32 * 4
        assert flat[at : at + 4].view(torch.int32) == 128 * codes[row].int().sum()
    assert flat[2454] == codes[37, 10]
    assert flat[4244:4248].view(torch.int32) == 128 * codes[37].int().sum()
    assert packed["weight_scale"][36] == 37


@pytest.mark.parametrize("fmt", [BF16, FP8], ids=lambda fmt: fmt.id)
def test_float_addresses(fmt: WeightFormat) -> None:
    n, k, rows, columns = 37, 40, 64, 64
    q = random_weight(fmt, (n, k), 1, 1)
    bits = torch.int16 if fmt is BF16 else torch.uint8
    flat = LAYOUTS[f"cpu-vnni-{fmt.id}"].pack(q)["weight"].flatten().view(bits)
    codes = q.codes.view(bits)
    for row, column in itertools.product(range(rows), range(columns)):
        address = row // 32 * 32 * columns + column // 2 * 64 + row % 32 * 2 + column % 2
        assert flat[address] == (codes[row, column] if row < n and column < k else 0)


def test_int4_addresses() -> None:
    n, k, group = 40, 72, 32
    q = random_weight(INT4_G32, (n, k), 1, 2, asymmetric=True)
    packed = LAYOUTS["cpu-vnni-int4"].pack(q)
    assert q.zeros is not None
    assert q.scales is not None
    block_k, k_blocks = group, 3
    size = 16 * block_k + 128
    flat = packed["weight"].flatten()
    for row, column in itertools.product(range(64), range(k_blocks * block_k)):
        block = (row // 32 * k_blocks + column // block_k) * size
        byte = int(flat[block + column % block_k // 4 * 64 + row % 32 // 16 * 32 + row % 8 * 4 + column % 4])
        nibble = byte & 15 if row // 8 % 2 == 0 else byte >> 4
        group_of = column // group
        expected = 0 if row >= n else q.zeros[row, group_of] if column >= k else q.codes[row, column]
        assert nibble == expected
    for row, block in itertools.product(range(n), range(k_blocks)):
        at = (row // 32 * k_blocks + block) * size + 16 * block_k + row % 32 * 4
        columns = slice(block * block_k, (block + 1) * block_k)
        expected = (q.codes[row, columns].int() - q.zeros[row, block].int()).sum()
        assert flat[at : at + 4].view(torch.int32) == expected
        assert packed["weight_zero_point"][row // 32, block, row % 32] == q.zeros[row, block]
        assert packed["weight_scale"][row // 32, block, row % 32] == q.scales[row, block]


def test_symmetric_int4_stores_zero_point_8() -> None:
    packed = LAYOUTS["cpu-vnni-int4"].pack(random_weight(INT4_G32, (32, 32), 1, 3))
    assert (packed["weight_zero_point"] == 8).all()


@pytest.mark.parametrize(
    ("name", "fmt", "shape", "parts", "reason"),
    [
        ("cpu-vnni-int8", FP8, (32, 32), 1, "holds int8, not fp8"),
        ("cpu-vnni-bf16", INT8, (32, 32), 1, "holds bf16, not int8"),
        ("cpu-vnni-int4", INT8, (32, 32), 1, "holds 4-bit codes"),
        ("cpu-vnni-int4", MXFP4, (32, 32), 1, "holds 4-bit codes"),
        ("cpu-mxfp4", INT4_G32, (32, 32), 1, "holds mxfp4, not int4-g32"),
        ("cpu-vnni-int4", IntegerFormat("g96", 4, torch.uint8, 7.0, 1, 96, 8), (32, 96), 1, "group 96"),
        ("cpu-vnni-int8", INT8, (32, 65_537), 1, "K = 65537"),
        ("cpu-vnni-fp8", FP8, (33, 32), 2, "N = 33 rows are not 2 equal parts"),
        ("cpu-vnni-fp8", FP8, (0, 32), 1, "shape [0, 32]"),
        ("cpu-vnni-fp8", FP8, (32,), 1, "shape [32]"),
        ("cpu-vnni-fp8", FP8, (1, 1, 32, 32), 1, "shape [1, 1, 32, 32]"),
    ],
)
def test_refusals(name: str, fmt: WeightFormat, shape: tuple[int, ...], parts: int, reason: str) -> None:
    reject = LAYOUTS[name].accepts(fmt, shape, parts)
    assert reject is not None
    assert reject.name == name
    assert reason in reject.reason


def test_mxfp4_addresses() -> None:
    n, k = 70, 150
    q = random_weight(MXFP4, (n, k), 1, 8)
    assert q.scales is not None
    blocks = LAYOUTS["cpu-mxfp4"].pack(q)["weight"]
    for row, column in itertools.product(range(n), range(k)):
        block, at, inner = blocks[row // 32, column // 64], column % 64, row % 32
        byte = int(block[64 + at // 8 * 128 + inner * 4 + at % 2 * 2 + at % 8 // 4])
        assert (byte & 15 if at % 4 < 2 else byte >> 4) == q.codes[row, column]
        assert from_e8m0(block[at // 32 * 32 + inner]) == q.scales[row, column // 32]
    scales, codes = blocks[..., :64], blocks[..., 64:]
    assert (scales[-1].view(-1, 2, 32)[..., 6:] == 127).all()  # of padded rows
    assert (codes[-1].view(-1, 8, 32, 4)[:, :, 6:] == 0).all()
    assert (scales[:, -1, 32:] == 127).all()  # of padded columns
    assert (codes[:, -1].view(3, 8, -1)[:, 3:] == 0).all()


def test_only_powers_of_two_are_mxfp4_scales() -> None:
    q = random_weight(MXFP4, (32, 64), 1, 9)
    assert q.scales is not None
    for wrong in (3.0, 0.0, float("nan"), -1.0, 2.0**-130):
        scales = q.scales.clone()
        scales[7, 1] = wrong
        with pytest.raises(LayoutError, match="no power of two"):
            LAYOUTS["cpu-mxfp4"].pack(QTensor(MXFP4, q.codes, scales))


@pytest.mark.parametrize("name", ["cpu-vnni-int8", "cpu-vnni-int4"])
def test_damage_is_noticed(name: str) -> None:
    layout = LAYOUTS[name]
    fmt = INT8 if name.endswith("8") else INT4_G32
    packed = layout.pack(random_weight(fmt, (32, 64), 1, 4))
    packed["weight"].flatten()[77] ^= 1
    with pytest.raises(LayoutError, match="compensation"):
        layout.unpack(packed, fmt, (32, 64))
    with pytest.raises(LayoutError, match=r"`weight` is torch\.(u?int8) .*, `weight_scale` is missing"):
        layout.unpack({"weight": packed["weight"].flatten()}, fmt, (32, 64))
