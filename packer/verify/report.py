"""The report: one HTML file that holds its JSON and draws everything from it, without any outside resource."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import VerifyError

from .summary import summary

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "/*DATA*/"
TEXT_PLACE = "<!--TEXT-->"  # for readers without JavaScript


def render(document: dict[str, Any]) -> str:
    """The page for a `Verification.to_json` document."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    # inside <script> only `<` can end the element or open a comment
    page = TEMPLATE.read_text(encoding="utf-8").replace(TEXT_PLACE, html.escape(summary(document)), 1)
    return page.replace(PLACE, text.replace("<", "\\u003c"), 1)


def write_report(document: dict[str, Any], path: Path) -> None:
    """Write the page under `path`, complete or not at all.

    Raises:
        VerifyError: It cannot be written there.
    """
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(render(document), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise VerifyError(f"{path}: the report cannot be written: {error.strerror}") from error
