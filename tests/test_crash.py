"""Nothing is lost: whenever a run is killed, however many there are, whatever happens to the source meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "crash"
pytestmark = pytest.mark.slow
# A server of runs: each is forked from it. One thread each, so that this says nothing about how they wait.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(script: str, *arguments: str | Path, preload: Path | None = None) -> dict[str, object]:
    """What a script of this folder reports."""
    environment = {**os.environ, **ENVIRONMENT, **({"LD_PRELOAD": str(preload)} if preload else {})}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr[-2000:]
    report: dict[str, object] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux":
        pytest.skip("the shim needs a C compiler and Linux")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "shim.c", "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def test_a_kill_at_every_40th_change_of_the_disk(shim: Path, tmp_path: Path) -> None:
    """All of them: `make crash-test`."""
    report = run("crash.py", tmp_path, "--every", "40", "--random", "10", preload=shim)
    assert report["bad"] == 0, report
    assert int(str(report["points"])) >= 30


def test_runs_at_the_same_time(tmp_path: Path) -> None:
    report = run("races.py", tmp_path, "--starts", "20")
    assert report["bad"] == 0, report


def test_a_source_that_moves(tmp_path: Path) -> None:
    report = run("moves.py", tmp_path, "--moments", "3")
    assert report["bad"] == 0, report
