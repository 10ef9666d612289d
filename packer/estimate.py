"""How long the computing of a plan will take on this machine, from a short measurement on random weights."""

from __future__ import annotations

import math
import time

import torch

from .plan import Plan
from .quantize.steps import QuantizeStep, quantize_matrix
from .solvers import SOLVERS

SAMPLE = (256, 2048)  # rows and columns: a multiple of every block, and long enough to time


def compute_seconds(plan: Plan, workers: int) -> float:
    """Seconds of computing, spread over `workers`; reading and writing overlap with it and are not counted.

    Every combination of weight format, solver and device is timed once. Codes that are taken over cost nothing here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have it: they share the CPUs by tasks
    try:
        return _seconds(plan) / max(workers, 1)
    finally:
        torch.set_num_threads(threads)


def _seconds(plan: Plan) -> float:
    rates: dict[tuple[str, str, str], float] = {}
    total = 0.0
    for step in (task.step for task in plan.tasks if isinstance(task.step, QuantizeStep)):
        for part in step.parts:
            if part.target is None or part.target.format == step.stored_format:
                continue
            key = (part.target.format, step.solver, step.device)
            if key not in rates:
                rates[key] = _weights_per_second(step, part.target.format)
            total += part.count * step.k / rates[key]
    return total


def _weights_per_second(step: QuantizeStep, fmt: str) -> float:
    part = next(part for part in step.parts if part.target and part.target.format == fmt)
    assert part.target
    weight = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    seconds = math.inf
    for _ in range(3):  # the first run also pays for what happens once
        start = time.perf_counter()
        q = quantize_matrix(
            lambda first, last: weight[first:last],
            SAMPLE,
            part.target.weight_format,
            SOLVERS[step.solver],
            step.device,
        )
        part.target.checkpoint_layout.pack(q)
        seconds = min(seconds, time.perf_counter() - start)
    return math.prod(SAMPLE) / seconds
