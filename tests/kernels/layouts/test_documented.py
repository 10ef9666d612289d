"""Every layout and format is specified in docs/format.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.kernels.formats import FORMATS
from tilewright.kernels.layouts import LAYOUTS

FORMAT = (Path(__file__).parents[3] / "docs" / "format.md").read_text()


@pytest.mark.parametrize("name", [*LAYOUTS, *FORMATS])
def test_every_id_is_specified(name: str) -> None:
    assert f"`{name}`" in FORMAT
