"""The conversion operators against their formulas in plain torch: the same bits, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tilewright.kernels import ops
from tilewright.kernels.formats import FORMATS, FP8, INT4_G32, INT4_G128, INT8, WeightFormat
from tilewright.kernels.ops import convert
from tilewright.packer.solvers.blocks import block_amax_formula, encode_formula, scales_from_amax
from tilewright.packer.solvers.mse import squared_error_formula

ISAS = [status.name for status in ops.kernel_report() if status.available and not status.name.startswith("amx")]
SCALED = [fmt for fmt in FORMATS.values() if fmt.native]  # that the native operators know
SHAPES = [(3, 96), (129, 256), (2, 4096 + 128), (257, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=ISAS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = ops.isa()
    ops.select_isa(request.param)
    yield
    ops.select_isa(before)


def weights(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Magnitudes of all sizes, among them zeros, ties and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight *= torch.exp2(torch.randint(-20, 6, (shape[0], 1), generator=generator).float())
    weight[torch.rand(shape, generator=generator) < 0.05] = 0
    weight[0, : shape[1] // 2] *= 1e-38
    weight[-1, ::2] = weight[-1, ::2].round()
    return weight.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().view(torch.uint8).equal(b.view(torch.uint8))


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_the_formulas(fmt: WeightFormat, dtype: torch.dtype) -> None:
    for seed, (n, k) in enumerate(SHAPES):
        weight = weights((n, k), dtype, seed)
        amax = convert.block_amax(weight, fmt)
        assert same(amax, block_amax_formula(weight, fmt))
        for scale_dtype, fraction in ((torch.float32, 1.0), (torch.bfloat16, 0.7)):  # 0.7: some codes are cut off
            scales = scales_from_amax(amax, replace(fmt, scale_dtype=scale_dtype), fraction)
            assert same(convert.encode(weight, scales, fmt), encode_formula(weight, scales, fmt)), (n, k)
            error = convert.squared_error(weight, scales, fmt)
            assert same(error, squared_error_formula(weight.float(), scales, fmt)), (n, k)


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)
def test_code_errors_have_the_same_bits_on_every_instruction_set(fmt: WeightFormat) -> None:
    """tests/packer/verify/test_weights.py compares them with their formula."""
    here = ops.isa()
    for seed, (n, k) in enumerate([(3, 96), (129, 256), (2, 4096 + 77), (257, 1)]):
        weight = weights((n, k), torch.bfloat16, seed)
        ideal = scales_from_amax(convert.block_amax(weight, fmt), fmt)
        scales = ideal * torch.where(torch.arange(ideal.shape[1]) % 3 == 1, 1.1, 1.0)
        codes = convert.encode(weight, ideal, fmt)
        found = []
        for name in (here, "portable"):
            ops.select_isa(name)
            found.append(convert.code_errors(weight, codes, scales, ideal, fmt))
        assert same(*found), (n, k)


@pytest.mark.parametrize("k", [1, 2, 45, 300, 4097, 9000])
def test_odd_widths(k: int) -> None:
    for fmt in (INT8, FP8):
        weight = weights((131, k), torch.bfloat16, k)
        amax = block_amax_formula(weight, fmt)
        assert same(convert.block_amax(weight, fmt), amax)
        scales = scales_from_amax(amax, fmt)
        assert same(convert.encode(weight, scales, fmt), encode_formula(weight, scales, fmt))
        assert same(convert.squared_error(weight, scales, fmt), squared_error_formula(weight.float(), scales, fmt))


def test_rows_apart() -> None:
    fmt = INT4_G32
    whole = weights((20, 160), torch.float16, 1)
    for part in (whole[3:19:2], whole[::3], whole[:, :96], whole[1:2], whole.T[:64, :].contiguous().T[:, :64]):
        scales = scales_from_amax(convert.block_amax(part, fmt), fmt)
        assert same(convert.encode(part, scales, fmt), encode_formula(part.contiguous(), scales, fmt))
    turned = whole.T[:, :].contiguous().T
    assert same(convert.block_amax(turned, fmt), convert.block_amax(whole, fmt))


def test_every_quotient_rounds_like_torch() -> None:
    """All numbers of 16 bits, and those around every tie of the codes."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    for fmt in (FP8, INT8, INT4_G128):
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ties = ((codes[:126] + codes[1:127]) / 2).repeat(3).view(3, -1)
        near = torch.stack([torch.nextafter(ties[0], torch.zeros(())), ties[1], torch.nextafter(ties[2], ties[2] + 1)])
        near = torch.cat([near, -near, near * 0.28, near / 56], 1).contiguous()
        for weight in (halves.view(torch.bfloat16), halves.view(torch.float16), near):
            finite = weight[torch.isfinite(weight)].reshape(1, -1)
            finite = torch.nn.functional.pad(finite.float(), (0, -finite.numel() % 128)).to(weight.dtype)
            finite = finite.reshape(-1, 128)
            scales = torch.ones(fmt.scale_rows(len(finite)), 1)
            assert same(convert.encode(finite, scales, fmt), encode_formula(finite, scales, fmt))
            values = convert.encode(finite, scales, fmt).float() - fmt.zero_point
            assert values.equal(fmt.nearest(finite.float()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -float("nan")])
def test_what_is_not_finite_shows_in_the_maximum(dtype: torch.dtype, bad: float) -> None:
    for fmt in (INT8, FP8, INT4_G32):
        for row, column in ((0, 0), (129, 95), (64, 50)):
            weight = weights((130, 96), dtype, 5)
            clean = torch.isfinite(convert.block_amax(weight, fmt))
            weight[row, column] = bad
            found = ~torch.isfinite(convert.block_amax(weight, fmt))
            assert bool(clean.all())
            assert int(found.sum()) == 1
            assert bool(found[row // fmt.block_n, column // fmt.block_k if fmt.block_k else 0])


@pytest.mark.parametrize(("block_n", "block_k"), [(1, 0), (0, 0), (128, 128), (1, 32), (3, 7)])
def test_scale_codes(block_n: int, block_k: int) -> None:
    generator = torch.Generator().manual_seed(2)
    n, k = 260, 224
    raw = torch.randint(0, 256, (n, k), generator=generator, dtype=torch.uint8)
    rows, columns = -(-n // (block_n or n)), -(-k // (block_k or k))
    scales = torch.rand(rows, columns, generator=generator) + 0.1
    spread = scales.repeat_interleave(block_n or n, 0)[:n].repeat_interleave(block_k or k, 1)[:, :k]
    values = raw.view(torch.float8_e4m3fn).float()
    values = torch.where(values.isnan(), torch.full((), torch.nan), values)
    for codes, want in (
        (raw.view(torch.float8_e4m3fn), values),
        (raw.view(torch.int8), raw.view(torch.int8).float()),
        (raw & 15, (raw & 15).float() - 8),
    ):
        for start, stop, step in ((0, n, 1), (5, 133, 1), (n - 1, n, 1)):
            found = convert.scale_codes(codes[start:stop:step], scales, block_n, block_k, start)
            torch.testing.assert_close(
                found, want[start:stop:step] * spread[start:stop:step], rtol=0, atol=0, equal_nan=True
            )


def test_nibbles() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack([every & 15, every >> 4], 1)
    joined = convert.join_nibbles(codes.reshape(2, 256))
    assert joined.reshape(-1).equal(every)
    assert convert.split_nibbles(every.reshape(2, 128)).equal(codes.reshape(2, 256))
    assert convert.split_nibbles(every, 8).equal((codes ^ 8).reshape(-1))
    for size in (0, 2, 4, 62, 66):
        assert convert.join_nibbles(codes.reshape(-1)[:size]).equal(every[: size // 2])


@pytest.mark.parametrize(("n", "k", "parts"), [(32, 64, 1), (45, 50, 1), (66, 300, 2), (1, 1, 1), (96, 257, 3)])
def test_packed_words_byte_by_byte(n: int, k: int, parts: int) -> None:
    """Against the index formulas of docs/format.md, element by element; two experts."""
    generator = torch.Generator().manual_seed(n)
    rows, kp = parts * -(-(n // parts) // 32) * 32, -(-k // 32) * 32
    at = [n_ // (n // parts) * (rows // parts) + n_ % (n // parts) for n_ in range(n)]  # packed row of each row
    for dtype, word in ((torch.int16, 4), (torch.uint8, 2), (torch.int8, 4)):
        codes = torch.randint(-128, 128, (2, n, k), generator=generator).to(dtype)
        packed = convert.pack_words(codes, parts, kp, word)
        per = word // dtype.itemsize
        want = torch.zeros(2, rows * kp, dtype=dtype)
        for row in range(n):
            for column in range(k):
                block, lane = at[row] // 32 * 32 * kp, at[row] % 32
                want[:, block + column // per * 32 * per + lane * per + column % per] = codes[:, row, column]
        assert packed.equal(want.reshape(2, rows, kp))
    with_sums = convert.pack_words(codes, parts, kp, 4, compensation=True).reshape(2, rows // 32, 32 * (kp + 4))
    assert with_sums[..., : 32 * kp].equal(packed.reshape(2, rows // 32, 32 * kp))
    sums = torch.zeros(2, rows, dtype=torch.int32)
    sums[:, at] = codes.sum(-1, dtype=torch.int32) * 128
    assert with_sums[..., 32 * kp :].contiguous().view(torch.int32).reshape(2, rows).equal(sums)


@pytest.mark.parametrize(("n", "k", "block", "group"), [(32, 128, 128, 128), (45, 300, 128, 256), (7, 40, 32, 32)])
def test_packed_int4_byte_by_byte(n: int, k: int, block: int, group: int) -> None:
    generator = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, -(-k // group)), generator=generator, dtype=torch.uint8)
    columns, size = -(-k // block), 16 * block + 128
    want = torch.zeros(-(-n // 32) * columns * size, dtype=torch.uint8)
    sums = torch.zeros(-(-n // 32) * 32, columns, dtype=torch.int32)
    for row in range(n):
        for column in range(columns * block):
            zero = int(zeros[row, min(column // group, zeros.shape[1] - 1)])
            code = int(codes[row, column]) if column < k else zero
            start = (row // 32 * columns + column // block) * size
            byte = start + column % block // 4 * 64 + row % 32 // 16 * 32 + row % 8 * 4 + column % 4
            want[byte] |= code << (4 * (row // 8 % 2))
            sums[row, column // block] += code - zero
    for i in range(-(-n // 32)):
        for j in range(columns):
            at = (i * columns + j) * size + 16 * block
            want[at : at + 128] = sums[i * 32 : (i + 1) * 32, j].contiguous().view(torch.uint8)
    assert convert.pack_int4(codes, zeros, 1, block, group).reshape(-1).equal(want)


def test_refusals_name_the_rule() -> None:
    weight = torch.ones(4, 32)
    with pytest.raises(RuntimeError, match="must be float32, bfloat16 or float16"):
        convert.block_amax(weight.double(), INT8)
    with pytest.raises(RuntimeError, match=r"scales must be contiguous float32 \[4, 1\]"):
        convert.encode(weight, torch.ones(3, 1), INT8)
    with pytest.raises(RuntimeError, match="even number of columns"):
        convert.join_nibbles(torch.ones(2, 3, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="a matrix with elements"):
        convert.block_amax(torch.ones(0, 3), INT8)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (4999,), (67, 130), (2, 65, 33)], ids=str)
def test_one_element_that_is_not_finite_is_found(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.rand(shape).add(0.5).mul(300).to(dtype)
    apart = torch.stack((values, values), -1)[..., 0]
    for _ in range(5):
        where = tuple(int(torch.randint(size, ())) for size in shape)
        for bad in (torch.nan, torch.inf, -torch.inf):
            if dtype.itemsize == 1 and bad == bad:
                continue  # these dtypes have no infinity
            for tensor in (values, apart):
                before = tensor[where].clone()
                assert convert.all_finite(tensor)
                tensor[where] = bad
                assert not convert.all_finite(tensor)
                tensor[where] = before


def test_codes_that_are_not_finite() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert [c for c in range(256) if not convert.all_finite(codes[c : c + 1])] == [0x7F, 0xFF]
    assert same(convert.block_amax(codes[:127].reshape(1, -1), FP8), torch.tensor([[448.0]]))
    assert all(convert.all_finite(torch.full((3,), -1, dtype=dtype)) for dtype in (torch.int8, torch.int32))
    assert convert.all_finite(torch.empty(0, 5))
