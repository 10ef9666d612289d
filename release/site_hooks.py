"""What the documentation site does to pages: links that leave docs/ lead into the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

REPOSITORY = "https://github.com/tilewright/tilewright"
OUTWARD = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for the text of each page."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if path.startswith("docs/"):
            return link[0]
        return f"]({REPOSITORY}/blob/main/{path}{link[2] or ''})"

    return OUTWARD.sub(absolute, markdown)
