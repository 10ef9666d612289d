"""Python's collector of cyclic garbage, and when to do without it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector inside the block, or the function that this decorates.

    Headers and plans are hundreds of thousands of objects that are all kept, and no cycles: as they become more, the
    collector would walk through all of them again and again, and through torch's too, a third of the time of planning.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
