"""Patterns that include and exclude modules, and what each one matched."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field

from tilewright.kernels.errors import PlanError

from ..families.roles import unwrapped


@dataclass
class Pattern:
    """One --exclude or --include argument.

    - `re:REGEX`: matched from the beginning of the module path, as compressed-tensors does.
    - with `*`, `?` or `[`: a glob over the whole path or over a tail of it that begins at a dot; `*` crosses dots.
    - otherwise a dotted path: the path itself, or its beginning, end or middle, always whole parts between dots.

    Each form is tried on the path as it is and on the path without the wrapper of a multimodal model, so
    `model.layers.0` finds `model.language_model.layers.0`. A trailing `.weight` is ignored.

    Attributes:
        text: The argument.
        matched: Modules that it has matched so far.
    """

    text: str
    matched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        bare = self.text.removesuffix(".weight")
        try:
            if self.text.startswith("re:"):
                self._regex = re.compile(self.text.removeprefix("re:"))
            elif re.search(r"[*?\[]", bare):
                self._regex = re.compile(rf"(?:.*\.)?(?:{fnmatch.translate(bare)})")
            else:
                self._regex = re.compile(rf"(?:.*\.)?{re.escape(bare)}(?:\.|$)")
        except re.error as error:
            raise PlanError(f"pattern `{self.text}` is not a valid regex: {error}") from error

    def matches(self, module: str, alias: str = "") -> bool:
        """Whether the pattern means this module, which the source may call `alias`; remembers it if so."""
        alias = alias or module
        found = any(self._regex.match(path) for path in {module, unwrapped(module), alias, unwrapped(alias)})
        if found:
            self.matched.append(module)
        return found


def first_match(patterns: list[Pattern], module: str, alias: str = "") -> Pattern | None:
    """The first of `patterns` that means `module` or the source's name for it; every one that does is credited."""
    found = [pattern for pattern in patterns if pattern.matches(module, alias)]
    return found[0] if found else None
