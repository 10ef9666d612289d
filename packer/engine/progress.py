"""Tell a person how far a run is: a bar on a terminal, a line every few seconds elsewhere, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from typing import Protocol, TextIO

PERIOD = 5.0  # seconds between lines


class Progress(Protocol):
    """Hears about bytes of output; called from several threads."""

    def start(self, total: int, done: int) -> None:
        """The work begins: `total` bytes in all, of which `done` were there before."""

    def advance(self, count: int) -> None:
        """`count` more bytes are written."""

    def finish(self) -> None:
        """The work is over, whether it succeeded or not."""


class Silent:
    """Says nothing."""

    def start(self, total: int, done: int) -> None:
        """Nothing."""

    def advance(self, count: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class Bar:
    """A tqdm bar with bytes, rate and time left."""

    def __init__(self, stream: TextIO) -> None:
        from tqdm import tqdm

        self._tqdm = tqdm
        self._stream = stream
        self._lock = threading.Lock()

    def start(self, total: int, done: int) -> None:
        """Draw the bar."""
        self._bar = self._tqdm(total=total, initial=done, unit="B", unit_scale=True, file=self._stream)

    def advance(self, count: int) -> None:
        """Move the bar."""
        with self._lock:
            self._bar.update(count)

    def finish(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class Lines:
    """A line every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def start(self, total: int, done: int) -> None:
        """Start the clock."""
        self._total, self._initial, self._done = total, done, done
        self._began = self._said = time.monotonic()

    def advance(self, count: int) -> None:
        """Say a line if the last one is a few seconds ago."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._said < PERIOD:
                return
            self._said = now
            rate = (self._done - self._initial) / (now - self._began)
            left = (self._total - self._done) / rate if rate else 0.0
            share = self._done / self._total
            print(
                f"{share:4.0%}  {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB written, "
                f"{rate / 1e6:.0f} MB/s, {left:.0f} s left",
                file=self._stream,
                flush=True,
            )

    def finish(self) -> None:
        """Nothing is left to say."""


def progress_on(stream: TextIO | None = None) -> Progress:
    """A bar if `stream` (stderr by default) is a terminal, lines otherwise."""
    stream = stream or sys.stderr
    return Bar(stream) if stream.isatty() else Lines(stream)
