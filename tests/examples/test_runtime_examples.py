"""Every example of the runtime runs and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.ranks import plan_ranks
from tilewright.packer.pack.target import CpuTarget

EXAMPLES = Path(__file__).parents[2] / "examples"
Call = Callable[..., Path]


def run(*arguments: object) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate(packed: Call) -> None:
    text = run(EXAMPLES / "generate.py", packed("tiny-qwen3-moe", "int8"), "And the LORD said", "--tokens", 8)
    assert text.startswith("cpu-vnni-bf16: linear_bf16 on ")
    assert len(text.splitlines()[-1]) == len("And the LORD said") + 8


def test_tensor_parallel(quantized: Call, packed: Call, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantized("tiny-qwen3-moe", "none"))
    for rank, plan in enumerate(plan_ranks(checkpoint, CpuTarget(), 2, 1)):
        execute(plan, checkpoint, tmp_path / f"rank-{rank}-of-2")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    cut = run(*launcher, EXAMPLES / "tensor_parallel.py", tmp_path, "And the LORD said", "--tokens", 8)
    whole = run(EXAMPLES / "generate.py", packed("tiny-qwen3-moe", "none"), "And the LORD said", "--tokens", 8)
    assert cut.splitlines()[-1] == whole.splitlines()[-1]


def test_own_module(packed: Call) -> None:
    text = run(EXAMPLES / "own_module.py", packed("tiny-deepseek-v3", "block-fp8"))
    assert text.count("cpu-vnni-fp8") == 2
    assert "model.layers.0.mlp (4, 256) -> (4, 256)" in text
    text = run(EXAMPLES / "own_module.py", packed("tiny-qwen3-moe", "int8"))
    assert "model.layers.0.mlp.experts (4, 256) -> (4, 256)" in text


def test_tokens_per_second(packed: Call) -> None:
    model = EXAMPLES / "models" / "tiny-qwen3-moe"
    sizes = ("--prompt", 16, "--tokens", 4)
    text = run(EXAMPLES / "tokens_per_second.py", packed("tiny-qwen3-moe", "int8"), "--source", model, *sizes)
    assert re.search(r"^packed: prefill [\d.]+ tokens/s, decode [\d.]+ tokens/s$", text, re.MULTILINE)
    assert re.search(r"^bf16: prefill", text, re.MULTILINE)


def test_notebook(tmp_path: Path) -> None:
    for _ in range(2):  # the second time goes on from what is there
        text = run(EXAMPLES / "notebook.py", tmp_path)
        assert "verifying layers: 100%\npassed\n" in text
        assert "refused: " in text
