"""Read mapped files that may become shorter meanwhile: a page that is gone is zeros and a count, not SIGBUS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .. import _native  # noqa: F401  # registers the operators


@contextmanager
def page_guard() -> Iterator[Callable[[], int]]:
    """Guard all mapped files that this process reads inside the block; gives what counts the pages lost in it.

    Whoever reads must ask for the count before using what came of it. Guards nest, and may be on in several threads.
    """
    before = int(torch.ops.tilewright.guard_pages(True))
    try:
        yield lambda: int(torch.ops.tilewright.replaced_pages()) - before
    finally:
        torch.ops.tilewright.guard_pages(False)
