"""The demo runs, prints one row per scheme, and leaves what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
ROW = r"^  (\S+) +(\d\.\d\d) MB +(\d+\.\d\d) .* (\d\.\d+)  +(\d\.\de-\d\d) +(\d\d\.\d\d)% +pass"


def test_demo(tmp_path: Path) -> None:
    options = ["--output", str(tmp_path / "out"), "--windows", "8", "--models", "tiny-deepseek-v3"]
    done = subprocess.run([sys.executable, str(DEMO), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(
        r"^  (\S+) +(\d\.\d\d) MB +(\d+\.\d\d) .* (\d\.\d+)  +(\d\.\de-\d\d) +(\d\d\.\d\d)% +pass", done.stdout, re.M
    )
    assert [row[0] for row in rows] == ["block-fp8", "int8", "int4", "w4afp8"]
    assert all(float(mb) < 5 and float(bits) < 9 for _, mb, bits, *_ in rows)
    lines = [line for line in done.stdout.splitlines() if "And the king said unto" in line]
    assert len(lines) == 5
    for scheme in (row[0] for row in rows):
        name = f"tiny-deepseek-v3-{scheme}"
        assert (tmp_path / "out" / f"{name}.html").is_file()
        assert (tmp_path / "out" / f"{name}-cpu" / "manifest.json").is_file()
