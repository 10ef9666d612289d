"""Whole models are compared in the memory of one layer of each: the peak does not grow with depth."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.sources.checkpoint import open_checkpoint

pytest.importorskip("transformers")

MODELS = Path(__file__).parents[3] / "examples" / "models"
HIDDEN, INNER = 512, 2048
MEASURE = """
import sys, torch
from pathlib import Path
from tilewright.packer.sources.checkpoint import open_checkpoint
from tilewright.packer.verify.directory import read_contents
from tilewright.packer.verify.job import Request
from tilewright.packer.verify.whole_model import compare_directories
torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
sides = [(checkpoint, read_contents(checkpoint)) for checkpoint in map(open_checkpoint, sys.argv[1:3])]
request = Request("model", text=Path(sys.argv[3]), windows=2, window=16, decode_steps=1)
result = compare_directories(sides, request, lambda done, total: None)
assert result.overall.kl < 0.01, result
print([int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def weights(layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()

    yield "model.embed_tokens.weight", matrix(256, HIDDEN)
    yield "lm_head.weight", matrix(256, HIDDEN)
    yield "model.norm.weight", torch.ones(HIDDEN).bfloat16()
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{base}.self_attn.{name}.weight", matrix(HIDDEN, HIDDEN)
        yield f"{base}.mlp.gate_proj.weight", matrix(INNER, HIDDEN)
        yield f"{base}.mlp.up_proj.weight", matrix(INNER, HIDDEN)
        yield f"{base}.mlp.down_proj.weight", matrix(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}.{name}.weight", torch.ones(HIDDEN).bfloat16()


def make(root: Path, layers: int) -> list[str]:
    """A generated model, and itself in int8 and packed."""
    source, quantized, packed = (root / f"{kind}-{layers}" for kind in ("source", "int8", "packed"))
    source.mkdir()
    save_file(dict(weights(layers)), source / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 256,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (source / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((MODELS / "tiny-qwen3-moe" / name).read_bytes())
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
def test_peak_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    layer = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) * (2 + 1) // 1024  # kB in bf16 and in int8
    growth = peak(make(tmp_path, 24)) - peak(make(tmp_path, 4))
    assert growth < 3 * layer, f"20 layers of {layer} kB added {growth} kB"
