"""The memory of a calibration is that of one layer and the activations, however deep the model, and is foretold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers")

MODELS = Path(__file__).parents[3] / "examples" / "models"
HIDDEN, INNER = 384, 1024
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER  # elements
PROBE = """
import sys
import time
from pathlib import Path
from tilewright.packer.calibrate.method import Method, Wanted
from tilewright.packer.calibrate.run import calibrate_checkpoint
from tilewright.packer.calibrate.store import Store
from tilewright.packer.sources.checkpoint import open_checkpoint
from tilewright.packer.schemes.base import Target

source, text, store = map(Path, sys.argv[1:4])
checkpoint = open_checkpoint(source)
names = [n.removesuffix(".weight") for n in checkpoint.files if n.endswith("_proj.weight")]
wanted = Wanted({name: Target("int8", "int8-channel") for name in names if sys.argv[4] in name}, frozenset())
calibrate_checkpoint(checkpoint, text, Method("gptq", "rtn", windows=4, window=32), wanted, Store(store), "key")
status = dict(line.split(":") for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024)  # mapped pages of the source count, too
"""


def generated_model(path: Path, depth: int, inner: int = INNER) -> Path:
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 256,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-qwen3-moe" / name, path / name)
    generator = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN)}
    shapes |= {"self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"mlp.gate_proj": (inner, HIDDEN), "mlp.up_proj": (inner, HIDDEN), "mlp.down_proj": (HIDDEN, inner)}
    tensors = {"model.embed_tokens.weight": torch.randn(256, HIDDEN, generator=generator)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(depth):
        stem = f"model.layers.{layer}"
        tensors |= {f"{stem}.{name}.weight": torch.randn(s, generator=generator) / 30 for name, s in shapes.items()}
        tensors |= {
            f"{stem}.{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path


def test_peak_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    peaks = []
    for depth in (4, 24):
        source = generated_model(tmp_path / f"depth-{depth}", depth)
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


def test_the_estimate_covers_hessians(tmp_path: Path) -> None:
    """A weight of 3072 columns has a Hessian of 36 MiB, and solving with it takes many times that."""
    source = generated_model(tmp_path / "source", 1, inner=3072)
    gptq = ("--solver", "gptq", "--calibrate", MODELS / "heldout.txt", "--calibrate-windows", 4)
    foretold = {}
    for solver, options in {"rtn": ("--solver", "rtn"), "gptq": gptq}.items():
        dry = command(source, tmp_path / "out", *options, "--dry-run", "--json", "--memory", "200MiB")
        done = subprocess.run(dry, check=True, capture_output=True, text=True, env=ONE_THREAD)
        foretold[solver] = json.loads(done.stdout)["peak_memory"]
        needed = f"note: about {foretold[solver] >> 20} MiB of memory are needed at least, --memory allows 200 MiB"
        assert needed in done.stderr
    assert foretold["gptq"] - foretold["rtn"] > 10 * 4 * 3072**2
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(source, tmp_path / "out", *gptq), env=ONE_THREAD, **quiet)
    peak = 0
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            peak = max(peak, int(line.split()[1]) << 10 if line.startswith("RssAnon:") else 0)
        time.sleep(0.005)
    assert process.returncode == 0
    assert 5 * 4 * 3072**2 < peak < foretold["gptq"]
