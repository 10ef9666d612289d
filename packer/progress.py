"""Tell a person how far a job is: a bar on a terminal or in a notebook, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Protocol, TextIO

PERIOD = 5.0  # seconds between lines
BYTES = "B"  # the unit that is told in powers of ten, with a rate


class Progress(Protocol):
    """Hears how far a job is. A job has one stage or several, one after the other; `advance` may come from any thread.

    Anything with these three methods can be handed to a job: a widget of a notebook, a line in a server's log.
    """

    def start(self, stage: str, total: int, done: int = 0, unit: str = BYTES) -> None:
        """A stage begins: `total` units of work, of which `done` were done by an earlier run."""

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""

    def finish(self) -> None:
        """The stage is over, whether it succeeded or not."""


class Silent:
    """Says nothing."""

    def start(self, stage: str, total: int, done: int = 0, unit: str = BYTES) -> None:
        """Nothing."""

    def advance(self, count: int = 1) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class Bar:
    """A tqdm bar for each stage, with rate and time left.

    Args:
        stream: Where it is drawn; None leaves the choice to tqdm, which knows notebooks.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        from tqdm.auto import tqdm as automatic
        from tqdm.std import tqdm as plain

        self._tqdm: Any = automatic if stream is None else plain
        self._stream = stream
        self._lock = threading.Lock()

    def start(self, stage: str, total: int, done: int = 0, unit: str = BYTES) -> None:
        """Draw the bar."""
        unit = unit if unit == BYTES else f" {unit}"
        self._bar = self._tqdm(
            desc=stage, total=total, initial=done, unit=unit, unit_scale=True, file=self._stream, dynamic_ncols=True
        )

    def advance(self, count: int = 1) -> None:
        """Move the bar."""
        with self._lock:
            self._bar.update(count)

    def finish(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class Lines:
    """A line every few seconds, with rate and time left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def start(self, stage: str, total: int, done: int = 0, unit: str = BYTES) -> None:
        """Start the clock."""
        self._stage, self._unit = stage, unit
        self._total, self._initial, self._done = total, done, done
        self._began = self._said = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Say a line if the last one is a few seconds ago."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._said < PERIOD:
                return
            self._said = now
            rate = (self._done - self._initial) / (now - self._began)
            left = f"{(self._total - self._done) / rate:.0f} s left" if rate else "time left unknown"
            print(f"{self._stage}: {self._done / max(self._total, 1):4.0%}  {self._amount()}, {self._rate(rate)}{left}",
                  file=self._stream, flush=True)  # fmt: skip

    def _amount(self) -> str:
        if self._unit == BYTES:
            return f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
        return f"{self._done} of {self._total} {self._unit}"

    def _rate(self, rate: float) -> str:
        return f"{rate / 1e6:.0f} MB/s, " if self._unit == BYTES else ""

    def finish(self) -> None:
        """Nothing is left to say."""


def progress_on(stream: TextIO | None = None) -> Progress:
    """A bar if `stream` (stderr by default) is a terminal or this is a notebook, lines otherwise."""
    if stream is None and "ipykernel" in sys.modules:
        return Bar()
    stream = stream or sys.stderr
    return Bar(stream) if stream.isatty() else Lines(stream)
