"""The tests of the operators again, on a library that checks every access and every undefined operation.

torch allocates each tensor for itself, so there is poisoned memory behind all weights, activations and results; every
instruction set of this machine takes part, AMX on emulated tiles.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SUITES = (
    *(f"ops/test_{name}.py" for name in ("linear", "bmm", "experts", "attention", "convert", "wrong_calls")),
    "modules/test_mlp.py",
    "modules/test_norms.py",
)
# The last half of the weights themselves is missing. What follows the weights of a block, corrections for instruction
# sets that need them, would go unread on the others; and loads of real AMX tiles are assembly, which no sanitizer sees.
OVERRUN = """
import ctypes, sys, sanitized, torch
from tilewright.kernels import ops
ops.select_isa(sys.argv[1])
short = torch.zeros(32 * 32 // 2, dtype=torch.int8)
raw = (ctypes.c_char * (32 * 36)).from_address(short.data_ptr())
ops.linear_int8(torch.ones(1, 32), torch.frombuffer(raw, dtype=torch.int8).view(32, 36), torch.ones(32), 32)
"""
pytestmark = pytest.mark.xdist_group("sanitizers")  # one build
INSTRUMENTED = ("portable", "amx_emu")  # what every machine runs, in C++ that the sanitizer sees all of


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What a process needs to run the library, which is built if it is not."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cmake, ninja, compiler = (shutil.which(name, path=path) for name in ("cmake", "ninja", "g++"))
    if not (cmake and ninja and compiler):
        pytest.skip("needs cmake, ninja and g++")
    libraries = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        libraries.append(found.stdout.strip())
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip(f"{compiler} has no sanitizers")
    build = ROOT / "build" / "sanitized"
    variables = {"TILEWRIGHT_SANITIZE": "ON", "Python_EXECUTABLE": sys.executable, "CMAKE_MAKE_PROGRAM": ninja}
    variables |= {"CMAKE_CXX_COMPILER": compiler}
    configure = [cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in variables.items()]
    build.mkdir(parents=True, exist_ok=True)
    with (build / ".turn").open("w") as turn:  # processes that share the tests build it once
        fcntl.flock(turn, fcntl.LOCK_EX)
        for command in (configure, [cmake, "--build", str(build)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return os.environ | {
        "SANITIZED_LIBRARY": str(build / "_C.so"),
        "PYTHONPATH": str(HERE),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    }


@pytest.mark.parametrize("isa", INSTRUMENTED)
def test_an_overrun_is_seen(environment: dict[str, str], isa: str) -> None:
    command = [sys.executable, "-c", OVERRUN, isa]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    # A read that begins inside and ends outside of the tensor has the other name with some compilers.
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr or "AddressSanitizer: unknown-crash" in done.stderr


def test_operators_stay_in_their_buffers(environment: dict[str, str]) -> None:
    tests = [str(HERE / suite) for suite in SUITES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "sanitized", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
