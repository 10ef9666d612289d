"""The native library: which instruction set it takes, and that no code leaks from one into another."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright.kernels import ops
from tilewright.kernels.errors import KernelUnavailableError

ROOT = Path(__file__).parent.parent.parent
OBJECTS = sorted((ROOT / "build").glob("py3-*/CMakeFiles/[ic]*_*.dir/**/*.o"))  # isa_*, convert_*; not of `sanitized`


def _isa_under(value: str) -> subprocess.CompletedProcess[str]:
    code = "from tilewright.kernels import ops; print(ops.isa())"
    env = {**os.environ, "TILEWRIGHT_ISA": value, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_report_names_every_instruction_set_once() -> None:
    report = ops.kernel_report()
    table = (ROOT / "kernels" / "csrc" / "cpu" / "instruction_sets.def").read_text()
    lines = re.findall(r"^TILEWRIGHT_INSTRUCTION_SET\((\w+), (\w+), \w+, (\w+), ", table, re.MULTILINE)
    here = [(name, tests_only) for name, on, tests_only in lines if on in {"any", platform.machine()}]
    assert [status.name for status in report] == [name for name, _ in here]
    assert {status.name for status in report if status.reason == "for tests only"} == {
        name for name, tests_only in here if tests_only == "true" and name != ops.isa()
    }
    assert [status.name for status in report if status.chosen] == [ops.isa()]
    assert all((status.reason is None) == status.chosen for status in report)
    assert all(status.available for status in report if status.name in {"portable", "amx_emu"})


def test_report_agrees_with_the_operating_system() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo to compare with")
    flags = set(re.findall(r"\w+", cpuinfo.read_text()))
    available = {status.name: status.available for status in ops.kernel_report()}
    assert available["avx2"] == ({"avx2", "fma", "bmi2", "movbe", "abm"} <= flags)
    assert available["avxvnni"] == (available["avx2"] and "avx_vnni" in flags)
    assert available["avx512"] == ({"avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512vbmi"} <= flags)
    if available["amx"]:
        assert {"amx_tile", "amx_int8", "amx_bf16"} <= flags


@pytest.mark.parametrize("name", ["portable", "amx_emu"])
def test_environment_lowers_the_choice(name: str) -> None:
    done = _isa_under(name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name


def test_environment_cannot_raise_the_choice() -> None:
    missing = [status.name for status in ops.kernel_report() if not status.available]
    for name in [*missing[:1], "sse9"]:
        done = _isa_under(name)
        assert done.returncode == 1
        assert name in done.stderr
        assert "hint: TILEWRIGHT_ISA can only lower" in done.stderr


def test_select_refuses_and_keeps_the_choice() -> None:
    before = ops.isa()
    with pytest.raises(KernelUnavailableError, match="there is no instruction set `sse9`; known are amx, avx512"):
        ops.select_isa("sse9")
    assert ops.isa() == before


def test_scratch_memory_goes_back_and_comes_again() -> None:
    code = """
import torch
from tilewright.kernels import ops

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

weight = torch.zeros(32, 4096, dtype=torch.bfloat16)
x = torch.ones(4096, 4096, dtype=torch.bfloat16)
y = ops.linear_bf16(x, weight, 32)
held = resident()
ops.release_scratch()
freed = held - resident()
assert freed > 4096 * 4096 * 2 * 0.9, freed  # fp32 or bf16 copies of x
assert torch.equal(ops.linear_bf16(x, weight, 32), y)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not OBJECTS, reason="the library was not built in this tree")
@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_objects_define_their_table_and_nothing_else(path: Path) -> None:
    """An inline function compiled here could replace its namesake elsewhere and fault on a lesser processor."""
    listing = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    shared = [line.split()[-1] for line in listing.splitlines() if re.match(r"[0-9a-f]+ [A-TV-Zuvw] ", line)]
    target = next(parent.stem for parent in path.parents if parent.suffix == ".dir")
    assert shared == [f"tilewright_{target}"]
    sections = subprocess.run(["objdump", "-h", str(path)], capture_output=True, text=True, check=True).stdout
    assert ".init_array" not in sections  # nothing runs when the library is loaded


def test_refusals_name_the_value_and_the_rule() -> None:
    weight = torch.zeros(64, 32, dtype=torch.bfloat16)
    x = torch.zeros(1, 32)
    with pytest.raises(RuntimeError, match=r"weight is \[64, 32\], x with 40 columns needs \[rows, 64\]"):
        ops.linear_bf16(torch.zeros(1, 40), weight, 64)
    with pytest.raises(RuntimeError, match="weight has 64 packed rows, n = 20 needs 32"):
        ops.linear_bf16(x, weight, 20)
    with pytest.raises(RuntimeError, match="bias has 3 elements, n is 64"):
        ops.linear_bf16(x, weight, 64, torch.zeros(3))
    with pytest.raises(RuntimeError, match="x must be float32, bfloat16 or float16"):
        ops.linear_bf16(x.double(), weight, 64)
    with pytest.raises(RuntimeError, match=r"scale is \[1, 2\], a weight of 64 x 32 needs \[1, 1\]"):
        ops.linear_fp8(x, weight.view(torch.float8_e4m3fn)[:, :32].contiguous(), torch.ones(1, 2), 64)
