"""Whole models are compared in the memory of one layer of each: the peak does not grow with depth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

pytest.importorskip("transformers")

MODELS = Path(__file__).parents[3] / "examples" / "models"
HIDDEN, INNER = 512, 2048
MEASURE = """
import sys, torch
from pathlib import Path
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright import VerifyOptions, load_model
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.verify.whole_model import compare_directories
torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
sides = [(checkpoint, read_contents(checkpoint)) for checkpoint in map(open_checkpoint, sys.argv[1:3])]
options = VerifyOptions("model", text=Path(sys.argv[3]), windows=2, window=16, decode_steps=1)
result = compare_directories(sides, options, load_model)
assert result.overall.kl < 0.01, result
print([int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def make(make_llama: Callable[..., Path], root: Path, layers: int) -> list[str]:
    """A generated model, and itself in int8 and packed."""
    source, quantized, packed = (root / f"{kind}-{layers}" for kind in ("source", "int8", "packed"))
    make_llama(source, layers, HIDDEN, INNER)
    checkpoint = open_checkpoint(source)
    execute(plan_quantize(checkpoint, QuantizeOptions("int8")), checkpoint, quantized)
    checkpoint = open_checkpoint(quantized)
    execute(plan_pack(checkpoint, CpuTarget()), checkpoint, packed)
    return [str(source), str(packed)]


def peak(sides: list[str]) -> int:
    """Peak memory of a comparison in kB."""
    command = [sys.executable, "-c", MEASURE, *sides, str(MODELS / "heldout.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from /proc")
def test_peak_memory_does_not_grow_with_depth(tmp_path: Path, make_llama: Callable[..., Path]) -> None:
    layer = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) * (2 + 1) // 1024  # kB in bf16 and in int8
    growth = peak(make(make_llama, tmp_path, 24)) - peak(make(make_llama, tmp_path, 4))
    assert growth < 3 * layer, f"20 layers of {layer} kB added {growth} kB"
