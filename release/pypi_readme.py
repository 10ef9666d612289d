"""The README as the package index shows it: relative links lead into the repository."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = "https://github.com/tilewright/tilewright"
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def with_absolute_links(text: str) -> str:
    """Links to the page of a file, pictures to the file itself."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({REPOSITORY}/{kind}/main/{link[3]})"

    return RELATIVE.sub(absolute, text)


def dynamic_metadata(field: str, settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What scikit-build-core asks a provider of metadata for."""
    if field != "readme" or settings:
        raise ValueError(f"{__name__} provides `readme` and has no settings")
    text = Path("README.md").read_text(encoding="utf-8")
    return {"text": with_absolute_links(text), "content-type": "text/markdown"}
