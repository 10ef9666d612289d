"""The documentation site: every page is in its navigation, references name what there is. `make docs` builds it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import tilewright

ROOT = Path(__file__).parent.parent


def test_navigation_names_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", navigation, re.MULTILINE)
    there = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted(there), "add new pages to `nav` in mkdocs.yml"


def test_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "reference" / "python.md").read_text()
    named = re.findall(r"^::: tilewright\.(\w+)$", reference, re.MULTILINE)
    assert sorted(named) == sorted(set(tilewright.__all__) - {"__version__"})


def test_links_out_of_the_documentation_lead_into_the_repository() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "release" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    class Page:
        class file:  # noqa: N801  # as mkdocs names it
            src_uri = "guides/a.md"

    text = "[a](../format.md#x), [b](../../benchmarks/results/b.md#y), [c](c.md)"
    wanted = f"[a](../format.md#x), [b]({hooks.REPOSITORY}/blob/main/benchmarks/results/b.md#y), [c](c.md)"
    assert hooks.on_page_markdown(text, page=Page) == wanted
