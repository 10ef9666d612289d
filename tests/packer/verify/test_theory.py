"""The table of theoretical errors in docs/accuracy.md, computed again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tilewright.kernels.formats import FORMATS
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.blocks import block_amax, expand

PAGE = Path(__file__).parents[3] / "docs" / "accuracy.md"
BLOCKS = ("a row of 4096", "128 x 128", "32 of a row", "64 of a row", "128 of a row")
ROWS = {
    cells[0]: cells[2:]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] in FORMATS and cells[1] in BLOCKS
}
N, K = 256, 4096


def weights(kind: str) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(N, K) * 2 - 1 if kind == "uniform" else torch.randn(N, K)


def test_the_table_has_every_format_with_scales() -> None:
    assert set(ROWS) == {fmt.id for fmt in FORMATS.values() if fmt.has_scales}


@pytest.mark.parametrize("kind", ["uniform", "Gaussian"])
@pytest.mark.parametrize("name", ROWS)
def test_the_table_is_right(name: str, kind: str) -> None:
    formula, rtn, mse = ROWS[name][:3] if kind == "uniform" else ROWS[name][3:]
    weight, fmt = weights(kind), FORMATS[name]
    amax = block_amax(weight, fmt)
    for solver, stated in (("rtn", rtn), ("mse", mse)):
        scales = SOLVERS[solver].scales(weight, amax, fmt)
        spread = expand(scales, fmt, N, K)
        error = (fmt.nearest(weight / spread) * spread - weight).norm() / weight.norm()
        assert 100 * float(error) == pytest.approx(float(stated), rel=0.01), solver
    if formula:
        spread_out = float(amax.square().mean().sqrt() / weight.square().mean().sqrt())
        assert 100 * spread_out / fmt.qmax / math.sqrt(12) == pytest.approx(float(formula), rel=0.01)
