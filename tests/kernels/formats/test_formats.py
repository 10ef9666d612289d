"""Every number format against its own grid, written out code by code."""

from __future__ import annotations

import pytest
import torch

from tilewright.kernels.formats import BF16, FORMATS, INT4_BY_GROUP, WeightFormat

SCALED = [fmt for fmt in FORMATS.values() if fmt.has_scales]
by_id = pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.id)


def codes(fmt: WeightFormat) -> torch.Tensor:
    """Every code that stands for a number, ascending by its byte."""
    every = torch.arange(256, dtype=torch.uint8)[: 1 << fmt.bits].view(fmt.code_dtype)
    return every[fmt.decode(every).isfinite()]


def grid(fmt: WeightFormat) -> torch.Tensor:
    """The steps that codes stand for, ascending; fp64."""
    return fmt.decode(codes(fmt)).to(torch.float64).unique()


def probes(fmt: WeightFormat) -> torch.Tensor:
    """Steps all over the grid, between its points, on them, and beyond its ends; fp32."""
    torch.manual_seed(6)
    points = grid(fmt).to(torch.float32)
    middles = (points[1:] + points[:-1]) / 2
    spread = (torch.rand(4000) * 2 - 1) * 2 * fmt.qmax
    small = spread * torch.rand(4000).pow(20)  # where the grid of a float is fine
    return torch.cat((points, middles, spread, small, torch.tensor([0.0, -0.0, 3e38, -3e38])))


@by_id
def test_nearest_is_the_nearest_point_of_the_grid(fmt: WeightFormat) -> None:
    points, steps = grid(fmt), probes(fmt)
    lowest = -fmt.zero_point or -fmt.qmax  # two's complement stays symmetric
    points = points[(points >= lowest) & (points <= fmt.qmax)]
    found = fmt.nearest(steps).to(torch.float64)
    assert torch.isin(found, points).all()
    best = (steps.to(torch.float64)[:, None] - points).abs().amin(1)
    assert torch.equal((found - steps).abs(), best)


@by_id
def test_ties_go_to_the_even_neighbour(fmt: WeightFormat) -> None:
    points = grid(fmt)[1:]  # int8 has no use for its lowest code
    middles = (points[1:] + points[:-1]) / 2
    chosen = fmt.encode(middles.to(torch.float32)).view(torch.uint8)
    assert (chosen % 2 == 0).all()


@by_id
def test_no_step_within_the_grid_is_off_by_more_than_half_a_step(fmt: WeightFormat) -> None:
    steps = probes(fmt)
    inside = steps[steps.abs() <= fmt.qmax]
    off = (fmt.nearest(inside).double() - inside.double()).abs()
    allowed = fmt.half_step(inside).double()
    assert (off <= allowed).all()
    assert (off == allowed).any(), "a bound that nothing reaches is too loose"


@by_id
def test_codes_come_back(fmt: WeightFormat) -> None:
    known = codes(fmt)
    steps = fmt.decode(known)
    kept = steps.abs() <= max(fmt.qmax, fmt.zero_point)
    assert torch.equal(fmt.decode(fmt.encode(steps[kept])), steps[kept])


@pytest.mark.parametrize("fmt", INT4_BY_GROUP.values(), ids=lambda fmt: fmt.id)
def test_zero_points_of_groups_replace_the_own_one(fmt: WeightFormat) -> None:
    torch.manual_seed(0)
    stored = torch.randint(0, 16, (3, 2 * fmt.block_k), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (3, 2), dtype=torch.uint8)
    steps = fmt.decode(stored, zeros)
    for column in range(stored.shape[1]):
        assert torch.equal(steps[:, column], stored[:, column].float() - zeros[:, column // fmt.block_k].float())


@by_id
def test_bars_count_every_code_once_and_ascend(fmt: WeightFormat) -> None:
    torch.manual_seed(2)
    known = codes(fmt)
    counts = torch.zeros(256, dtype=torch.int64)
    counts[known.view(torch.uint8).long()] = torch.randint(1, 100, (len(known),))
    labels, bars = fmt.bars(counts)
    assert len(labels) == len(bars) == len(set(labels))
    assert sum(bars) == counts.sum()
    last = torch.zeros(256, dtype=torch.int64)
    last[known[fmt.decode(known).argmax()].view(torch.uint8).long()] = 1
    assert fmt.bars(last)[1] == [0] * (len(bars) - 1) + [1]


def test_bf16_rounds_and_bounds() -> None:
    torch.manual_seed(1)
    values = torch.cat((torch.randn(5000) * torch.randn(5000).exp(), torch.tensor([1 + 2**-8])))
    off = (BF16.nearest(values) - values).abs()
    assert (off <= BF16.half_step(values)).all()
    assert (off > BF16.half_step(values) * 0.99).any()
    assert torch.equal(BF16.decode(BF16.encode(values)), values.bfloat16().float())
