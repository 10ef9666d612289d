"""How long the computing of a plan will take on this machine, from a short measurement on random weights."""

from __future__ import annotations

import math
import time

import torch

from .plan import Plan, Work, kinds

SAMPLE = (256, 2048)  # rows and columns: a multiple of every block, and long enough to time


def compute_seconds(plan: Plan, workers: int) -> float:
    """Seconds of computing, spread over `workers`; reading and writing overlap with it and are not counted.

    Every kind of work that a step states is timed once.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have it: they share the CPUs by tasks
    try:
        return _seconds(plan) / max(workers, 1)
    finally:
        torch.set_num_threads(threads)


def _seconds(plan: Plan) -> float:
    rates: dict[tuple[str, ...], float] = {}
    total = 0.0
    for task, count in kinds(plan.tasks):
        for work in task.step.work():
            if work.kind not in rates:
                rates[work.kind] = _seconds_per_weight(work)
            total += count * work.weights * rates[work.kind]
    return total


def _seconds_per_weight(work: Work) -> float:
    weight = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    seconds = math.inf
    for _ in range(3):  # the first run also pays for what happens once
        start = time.perf_counter()
        work.trial(weight)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds / math.prod(SAMPLE)
