"""The memory of a calibration is that of one layer and the activations, however deep the model, and is foretold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tilewright

pytest.importorskip("transformers")

MODELS = Path(__file__).parents[3] / "examples" / "models"
HIDDEN, INNER = 384, 1024
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER  # elements
PROBE = """
import sys
from pathlib import Path
from tilewright.packer.calibrate.method import Method, CalibrationTargets
from tilewright.packer.calibrate.run import calibrate_checkpoint
from tilewright.packer.calibrate.store import Store
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.schemes.scheme import StorageSpec

source, text, store = map(Path, sys.argv[1:4])
checkpoint = open_checkpoint(source)
names = [n.removesuffix(".weight") for n in checkpoint.files if n.endswith("_proj.weight")]
targets = {name: StorageSpec("int8", "int8-channel") for name in names if sys.argv[4] in name}
wanted = CalibrationTargets(targets, frozenset())
calibrate_checkpoint(checkpoint, text, Method("gptq", "rtn", windows=4, window=32), wanted, Store(store), "key")
status = dict(line.split(":") for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024)  # mapped pages of the source count, too
"""


def test_peak_memory_does_not_grow_with_depth(tmp_path: Path, make_llama: Callable[..., Path]) -> None:
    peaks = []
    for depth in (4, 24):
        source = make_llama(tmp_path / f"depth-{depth}", depth, HIDDEN, INNER)
        arguments = [source, MODELS / "heldout.txt", tmp_path / f"store-{depth}", "layers.0.self_attn"]
        run = subprocess.run(
            [sys.executable, "-c", PROBE, *map(str, arguments)],
            check=True,
            capture_output=True,
            text=True,
            env=ONE_THREAD,
        )
        peaks.append(int(run.stdout))
    bytes_per_layer = LAYER * 4  # as it lies in memory; half of that in the file
    assert peaks[1] - peaks[0] < 3 * bytes_per_layer


def command(*arguments: object) -> list[str]:
    fixed = ["--scheme", "int8", "--jobs", "1"]
    return [str(Path(sys.executable).parent / "quantize-model"), *map(str, arguments), *fixed]


def test_the_estimate_covers_hessians(
    tmp_path: Path, make_llama: Callable[..., Path], peak_anonymous: Callable[..., int]
) -> None:
    """A weight of 3072 columns has a Hessian of 36 MiB, and solving with it takes many times that."""
    source = make_llama(tmp_path / "source", 1, HIDDEN, 3072)
    text, run = MODELS / "heldout.txt", tilewright.RunOptions(jobs=1, memory=200 << 20)
    foretold = {}
    for solver, calibration in {"rtn": None, "gptq": tilewright.CalibrationOptions(text, windows=4)}.items():
        options = tilewright.QuantizeOptions("int8", solver=solver)
        dry = tilewright.quantize(source, tmp_path / "out", options, calibration=calibration, run=run, dry_run=True)
        foretold[solver] = dry.summary.job.peak_memory
        needed = f"about {foretold[solver] >> 20} MiB of memory are needed at least, --memory allows 200 MiB"
        assert needed in dry.notes
    assert foretold["gptq"] - foretold["rtn"] > 10 * 4 * 3072**2
    gptq = ("--solver", "gptq", "--calibrate", text, "--calibrate-windows", 4)
    peak = peak_anonymous(command(source, tmp_path / "out", *gptq), ONE_THREAD)
    assert 5 * 4 * 3072**2 < peak < foretold["gptq"]
