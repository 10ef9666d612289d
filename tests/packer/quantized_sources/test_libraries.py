"""Which libraries judge their own formats in this run; one that is not installed is told, and its records judge."""

from __future__ import annotations

import pytest

from . import library_sources, recorded_sources  # noqa: F401  # add their variants
from .sources import VARIANTS

PREFIXES = {"mlx": "mlx", "bitsandbytes": "bnb", "hqq": "hqq", "torchao": "torchao"}


@pytest.mark.parametrize("library", PREFIXES)
def test_the_library_judges(library: str) -> None:
    made = [name for name in VARIANTS if name.startswith(PREFIXES[library])]
    if library not in library_sources.INSTALLED:
        assert not made
        pytest.skip(f"{library} is not installed: make test-oracles runs what it writes anew")
    assert len(made) >= 6


@pytest.mark.parametrize("prefix", ["bnb", "hqq", "torchao"])
def test_records_judge_without_the_library(prefix: str) -> None:
    assert len([name for name in VARIANTS if name.startswith(f"recorded-{prefix}")]) >= 6
