"""Threads by the size of the work: operators on small tensors are not shared, waiting for each other costs more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SHARED = 1 << 24  # weights that an operator must read before a second thread is worth its start and its waiting


@contextmanager
def threads_for(weights: int) -> Iterator[None]:
    """Run torch's operators on one thread inside, if they read fewer than `SHARED` weights at a time.

    torch's threads spin while they wait for each other. On a machine with other work, one operator of microseconds then
    waits for a thread that is not running: verifying a model of 4 million weights took 7 CPU-seconds and 72 s instead
    of 2 and 20.
    """
    before = torch.get_num_threads()
    if weights < SHARED:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
