"""Attention of decode steps: the numbers of float64, the same bits everywhere, inputs left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels import ops
from tilewright.kernels.ops import reference
from tilewright.kernels.ops.attention import attend

STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def operands(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0, spread: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, H' G, 1, D], key [B, H', T, D], value [B, H', T, D'] for sizes (B, H', G, T, D, D')."""
    batch, heads, group, length, d, d_value = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads * group, 1, d), (batch, heads, length, d), (batch, heads, length, d_value)
    q, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * spread).to(dtype), key.to(dtype), value.to(dtype)


def close(y: torch.Tensor, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> bool:
    wanted = reference.attend(q, key, value, scale)
    score = (q.double().abs().amax() * key.double().abs().amax() * scale * q.shape[-1]).clamp(min=1)
    slack = STEP[q.dtype] * wanted.abs() + 2e-7 * score * value.double().abs().amax()
    return y.shape == wanted.shape and bool(((y.double() - wanted).abs() <= slack).all())


@given(data=st.data())
@settings(max_examples=25)
def test_numbers_are_those_of_float64_and_bits_those_of_portable_code(isa: str, data: st.DataObject) -> None:
    draw = data.draw
    lengths = st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 600]))
    sizes = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(lengths))
    sizes += (draw(st.integers(1, 70)), draw(st.integers(1, 70)))
    dtype, spread = draw(st.sampled_from(list(STEP))), draw(st.sampled_from([0.0, 1.0, 30.0]))
    q, key, value = operands(sizes, dtype, draw(st.integers(0, 10**6)), spread)
    before = [t.clone() for t in (q, key, value)]
    scale = sizes[-2] ** -0.5
    y = attend(q, key, value, scale)
    assert (y.dtype, y.is_contiguous()) == (dtype, True)
    assert close(y, q, key, value, scale)
    assert all(torch.equal(a, b) for a, b in zip((q, key, value), before, strict=True))
    ops.select_isa("portable")
    assert torch.equal(attend(q, key, value, scale), y)
    ops.select_isa(isa)


def test_bits_depend_neither_on_threads_nor_on_the_batch() -> None:
    q, key, value = operands((3, 2, 4, 700, 64, 64))
    together = attend(q, key, value, 0.125)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [attend(q[b : b + 1], key[b : b + 1], value[b : b + 1], 0.125) for b in range(3)]
        torch.set_num_threads(3)
        assert torch.equal(attend(q, key, value, 0.125), together)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), together)


def test_views_of_a_cache_and_of_a_projection() -> None:
    q, key, value = operands((2, 3, 2, 300, 40, 24))
    as_projected = q.transpose(1, 2).contiguous().transpose(1, 2)
    cache = torch.full((2, 3, 400, 64), torch.nan, dtype=torch.bfloat16)
    cache[:, :, 50:350, :40], cache[:, :, 50:350, 40:] = key, value
    y = attend(as_projected, cache[:, :, 50:350, :40], cache[:, :, 50:350, 40:], 0.2)
    assert torch.equal(y, attend(q, key, value, 0.2))
    spaced = (t.repeat_interleave(2, -1)[..., ::2] for t in (key, value))
    assert torch.equal(attend(q, *spaced, 0.2), y)
    by_token = key.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(q.repeat_interleave(2, -1)[..., ::2], by_token, value, 0.2), y)


def test_large_scores_and_numbers_that_are_none() -> None:
    q, key, value = operands((1, 1, 2, 520, 32, 32), torch.float32, spread=1e6)
    assert close(attend(q, key, value, 1.0), q, key, value, 1.0)
    huge = attend(torch.full((1, 1, 1, 8), 1e30), torch.full((1, 1, 3, 8), -1e30), torch.ones(1, 1, 3, 4), 1.0)
    assert huge.isnan().all()  # every score is -inf, for which softmax has no value
    value[0, 0, 5] = torch.nan
    assert attend(q * 0, key, value, 1.0).isnan().all()


@pytest.mark.parametrize("rows", [slice(0, 256), slice(256, 512), slice(512, 520), slice(3, 4)])
def test_minus_infinity_in_all_scores_of_a_chunk_counts_nothing(isa: str, rows: slice) -> None:
    q, key, value = operands((2, 1, 2, 520, 32, 32), torch.float32)
    q = q.abs()
    key[:, :, rows] = -torch.inf
    y = attend(q, key, value, 0.2)
    left = torch.ones(520, dtype=torch.bool)
    left[rows] = False
    assert close(y, q, key[:, :, left], value[:, :, left], 0.2)


@pytest.mark.parametrize(("batch", "heads"), [(0, 4), (2, 0), (0, 0)])
def test_nothing_to_attend_for(batch: int, heads: int) -> None:
    y = attend(torch.ones(batch, heads, 1, 8), torch.ones(batch, 2, 5, 8), torch.ones(batch, 2, 5, 6), 1.0)
    assert y.shape == (batch, 1, heads, 6)


def test_opcheck_and_compilation() -> None:
    arguments = (*operands((2, 2, 3, 9, 16, 8)), 0.25)
    torch.library.opcheck(torch.ops.tilewright.attend.default, arguments)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), attend(*arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(1, 4, 2, 8)}, r"q must be \[batch, heads, 1, size\]"),
        ({"q": torch.ones(1, 3, 1, 8)}, "a multiple of those of key"),
        ({"q": torch.ones(1, 4, 1, 7)}, "sizes must be equal"),
        ({"key": torch.ones(2, 2, 5, 8)}, r"key is \[2, 2, 5, 8\], it must be"),
        ({"key": torch.ones(1, 2, 5, 8).half()}, "key must be of the dtype of q"),
        ({"value": torch.ones(1, 2, 6, 8)}, r"value is \[1, 2, 6, 8\]"),
        ({"key": torch.ones(1, 2, 0, 8), "value": torch.ones(1, 2, 0, 8)}, "key is"),
    ],
)
def test_refusals(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"q": torch.ones(1, 4, 1, 8), "key": torch.ones(1, 2, 5, 8), "value": torch.ones(1, 2, 5, 8)} | change
    with pytest.raises(RuntimeError, match=message):
        attend(**arguments, scale=1.0)
