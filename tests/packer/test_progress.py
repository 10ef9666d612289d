"""What a person sees while a run goes on."""

from __future__ import annotations

import io

import pytest

from tilewright.packer import progress
from tilewright.packer.progress import Bar, Lines, progress_on


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    bar = progress_on(stream)
    assert isinstance(bar, Bar)
    bar.start("writing", 2_000_000_000, 500_000_000)
    bar.advance(500_000_000)
    bar.finish()
    assert "50%" in stream.getvalue()
    assert "1.00G/2.00G" in stream.getvalue()
    assert "B/s" in stream.getvalue()


def test_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    lines = progress_on(stream)
    assert isinstance(lines, Lines)
    lines.start("writing", 4_000_000_000, 1_000_000_000)
    for _ in range(10):
        now[0] += 1
        lines.advance(100_000_000)
    lines.finish()
    assert stream.getvalue().splitlines() == [
        "writing:  38%  1.50 of 4.00 GB, 100 MB/s, 25 s left",
        "writing:  50%  2.00 of 4.00 GB, 100 MB/s, 20 s left",
    ]


def test_other_units_have_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    lines = progress_on(stream)
    lines.start("calibrating", 4, unit="layers")
    now[0] += 10
    lines.advance()
    lines.finish()
    assert stream.getvalue() == "calibrating:  25%  1 of 4 layers, 30 s left\n"
