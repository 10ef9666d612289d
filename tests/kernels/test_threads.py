"""The queue that the tasks of an expert layer come from, under ThreadSanitizer, in a program without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "kernels" / "csrc"
SOURCES = [CSRC / "cpu" / name for name in ("experts_job.cpp", "scratch.cpp", "isa/portable.cpp")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the program."""
    compiler = shutil.which("g++", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if not compiler:
        pytest.skip("needs g++")
    found = subprocess.run([compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip(f"{compiler} has no ThreadSanitizer")
    output = tmp_path_factory.mktemp("threads") / "experts_threads"
    options = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-ffp-contract=off", f"-I{CSRC}", "-pthread"]
    sources = [str(path) for path in (HERE / "experts_threads.cpp", *SOURCES)]
    subprocess.run([compiler, *options, *sources, "-o", str(output)], check=True)
    # Addresses are not randomized: older sanitizers do not know all the places where newer kernels put things.
    fixed = shutil.which("setarch")
    return [fixed, "-R", str(output)] if fixed else [str(output)]


def test_no_race_and_the_same_bits_on_several_threads(program: list[str]) -> None:
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "120 layers are the same bits" in done.stdout


def test_a_planted_race_is_seen(program: list[str]) -> None:
    done = subprocess.run([*program, "planted"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert "data race" in done.stderr
