"""Every family of the registry: quantized, packed, verified, loaded, run, and the page of docs about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from family import Family
from registry import FAMILIES
from table import SCHEMES, STEPS, measure, quieten, unexpected

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FAST = 9  # every so many of the families are in `make test-fast`
WORK, THROUGHOUT = 80, 60  # families that have to: here, and by transformers as well


def cases() -> list[object]:
    """Each family once, with a scheme that goes round; most of them marked as slow."""
    return [
        pytest.param(
            family,
            tuple(SCHEMES)[number % len(SCHEMES)],
            id=f"{family.model_type}-{tuple(SCHEMES)[number % len(SCHEMES)]}",
            marks=[] if number % FAST == 0 else pytest.mark.slow,
        )
        for number, family in enumerate(FAMILIES)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "scheme"), cases())
def test_a_family(family: Family, scheme: str, tmp_path: Path) -> None:
    quieten()
    row = measure(family, (scheme,), tmp_path)
    kept = Family(**{**vars(family), "refused": {k: v for k, v in family.refused.items() if k in row.failed}})
    assert not unexpected(kept, row)


def test_the_page_has_the_rows_of_the_registry() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| ([\w-]+) \|(.*)\|$", PAGE.read_text(), re.M)
    assert [(name, kind, group) for name, kind, group, _ in rows] == [
        (family.name, family.model_type, family.group) for family in FAMILIES
    ]
    refused = [
        [step for step, cell in zip(STEPS, cells.split("|"), strict=True) if "refused" in cell] for *_, cells in rows
    ]
    assert refused == [[step for step in STEPS if step in family.refused] for family in FAMILIES]
    assert sum(not steps for steps in refused) >= THROUGHOUT
    assert sum(not set(steps) - {STEPS[-1]} for steps in refused) >= WORK
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES) >= 60
