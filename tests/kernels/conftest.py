from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilewright.kernels import ops

ISAS = [status.name for status in ops.kernel_report() if status.available]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine can run, the emulated one included, chosen for one test."""
    before = ops.isa()
    ops.select_isa(request.param)
    yield request.param
    ops.select_isa(before)
