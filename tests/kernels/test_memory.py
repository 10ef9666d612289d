"""No second copy of packed weights: a process that has run every layer holds clean pages of the file, little else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget

SIZE = 4096
PROBE = """
import json, sys, torch, tilewright
from pathlib import Path
from tilewright.kernels import modules

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

x = torch.randn(1, 4096).to(torch.bfloat16)
before = anonymous()
packed = tilewright.load_packed(sys.argv[1])
layers = [packed[name] for name in packed]
total = sum(float(layer(x).float().abs().sum()) for layer in layers)
growth, seen, mine = anonymous() - before, {}, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    key, _, value = line.partition(":")
    if " " in key:
        mine = line.endswith("model.safetensors")
    elif mine and value.endswith("kB"):
        seen[key] = seen.get(key, 0) + int(value.split()[0]) * 1024
print(json.dumps({"total": total, "growth": growth, **seen}))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps of Linux")
def test_weights_stay_in_the_pages_of_the_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "w8a8_int8"}}
    (source / "config.json").write_text(json.dumps(config))
    tensors = {}
    for number in range(2):
        name = f"model.layers.{number}.mlp.up_proj"
        tensors[f"{name}.weight"] = torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
        tensors[f"{name}.weight_scale"] = torch.ones(SIZE, 1)
    save_file(tensors, source / "model.safetensors")
    checkpoint = open_checkpoint(source)
    execute(plan_pack(checkpoint, CpuTarget()), checkpoint, tmp_path / "packed")
    command = [sys.executable, "-c", PROBE, str(tmp_path / "packed")]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # each of many would have memory of its own
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
    seen = json.loads(done.stdout)
    weights = 2 * SIZE * (SIZE + 4)
    assert seen["total"] > 0
    assert seen["growth"] < weights // 4  # a copy of one layer would be half
    assert seen["Rss"] > weights // 2  # pages were read, though the system may have taken some back since
    assert seen["Anonymous"] == 0  # and none copied: processes share them
