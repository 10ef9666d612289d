"""Tasks side by side: within the budget, in order, all of them or the first error."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from tilewright.packer.engine.workers import Work, Workers


@pytest.mark.parametrize("count", [1, 3])
def test_all_run_within_the_budget(count: int) -> None:
    lock = threading.Lock()
    used, peak, ran = 0, 0, []
    costs = [3, 9, 1, 1, 4, 25, 2, 7, 0, 5] * 5

    def work(number: int) -> None:
        nonlocal used, peak
        with lock:
            used += costs[number]
            peak = max(peak, used)
            ran.append(number)
        torch.ones(100).sum()
        with lock:
            used -= costs[number]

    threads = torch.get_num_threads()
    Workers(((cost, partial(work, i)) for i, cost in enumerate(costs)), count, 10).run()
    assert sorted(ran) == list(range(len(costs)))
    assert peak == 25  # only the one that is larger than the budget, alone
    assert torch.get_num_threads() == threads


def test_tasks_run_side_by_side_when_they_may() -> None:
    barrier = threading.Barrier(3)

    def meet() -> None:
        barrier.wait(60)

    Workers([(5, meet)] * 3, 3, 15).run()


def test_the_first_error_stops_the_rest() -> None:
    ran = []

    def work(number: int) -> None:
        ran.append(number)
        if number == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        Workers(((1, partial(work, i)) for i in range(1000)), 2, 10).run()
    assert len(ran) < 1000
    with pytest.raises(ValueError, match="queue"):
        Workers((_fail() for _ in range(3)), 2, 10).run()


def _fail() -> Work:
    raise ValueError("queue")
