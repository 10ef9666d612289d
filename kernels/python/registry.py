"""A visible, ordered table of named things."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from .errors import TilewrightError


class Named(Protocol):
    """Anything that carries its own id."""

    @property
    def id(self) -> str:
        """The name under which the registry lists it."""


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T]):
    """Maps ids to entries in the order in which they were listed; a failed look-up names the candidates.

    Args:
        what: Singular noun for messages, such as "layout".
        entries: The entries; ids must differ.
    """

    def __init__(self, what: str, entries: Iterable[T]) -> None:
        self._what = what
        self._entries: dict[str, T] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: T) -> None:
        """List one more entry at the end, such as one from another package."""
        assert entry.id not in self._entries, f"two {self._what}s are called {entry.id}"
        self._entries[entry.id] = entry

    @contextmanager
    def extended(self, entry: T) -> Iterator[None]:
        """List one more entry inside a `with` block."""
        self.add(entry)
        try:
            yield
        finally:
            del self._entries[entry.id]

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        close = difflib.get_close_matches(name, self._entries, n=1)
        guess = f", did you mean `{close[0]}`?" if close else ""
        raise TilewrightError(f"unknown {self._what} `{name}`{guess}", hint=f"known: {', '.join(self._entries)}")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
