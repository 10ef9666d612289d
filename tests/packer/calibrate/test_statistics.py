"""Sums over batches are what one look at all inputs gives."""

from __future__ import annotations

import pytest
import torch

from tilewright.packer.calibrate.statistics import InputStatistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_add_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(3, 17, 40) * torch.rand(40) * 5).to(dtype)
    statistics = InputStatistics(40)
    for batch in inputs:
        statistics.add(batch)
    statistics.add(inputs[:0])
    x = inputs.flatten(0, 1).double()
    assert statistics.tokens == 51
    assert statistics.hessian is not None
    torch.testing.assert_close(statistics.hessian.double(), x.T @ x, rtol=1e-5, atol=1e-4)
    assert torch.equal(statistics.channel_amax.double(), x.abs().amax(0))
    assert statistics.amax == float(x.abs().max())


def test_weights_count_in_the_hessian_only() -> None:
    torch.manual_seed(1)
    x, weights = torch.randn(9, 5), torch.rand(9)
    statistics = InputStatistics(5)
    statistics.add(x, weights)
    assert statistics.hessian is not None
    torch.testing.assert_close(statistics.hessian, x.T @ torch.diag(weights) @ x)
    assert torch.equal(statistics.channel_amax, x.abs().amax(0))


@pytest.mark.parametrize("percent", [1.0, 50.0, 90.0, 99.9])
def test_a_percentile_covers_its_share(percent: float) -> None:
    torch.manual_seed(2)
    inputs = torch.randn(1000, 8).exp()
    statistics = InputStatistics(8, with_hessian=False)
    for batch in inputs.split(300):
        statistics.add(batch)
    magnitudes = inputs.to(torch.bfloat16).abs().flatten().float()
    bound = statistics.percentile(percent)
    share = round(percent * len(magnitudes) / 100)
    assert int((magnitudes <= bound).sum()) >= share > int((magnitudes < bound).sum())


def test_the_hundredth_percentile_is_the_largest_magnitude() -> None:
    statistics = InputStatistics(3, with_hessian=False)
    assert statistics.percentile(99) == 0 == statistics.percentile(100)
    statistics.add(torch.tensor([[0.0, -1.001, 0.5]]))
    assert statistics.percentile(100) == pytest.approx(1.001)
    assert statistics.hessian is None
