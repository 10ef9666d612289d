"""What planning costs: CPU-seconds and peak memory of dry runs on a model of which only the headers are on disk.

    python benchmarks/bench_planning.py --experts 384 --layers 61

Writes the headers of a mixture of experts in block FP8 with the sizes of a model of one terabyte (139,583 tensors).
Then it runs each command with `--dry-run` in a process of its own, Python and `import torch` included. CPU-seconds are
those of user and system by `os.times`, the peak is `VmHWM` of /proc/self/status.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HIDDEN, INNER, DENSE, VOCABULARY, HEADS = 7168, 2048, 18432, 163840, 64
SIZES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
COMMANDS = {
    "import torch": None,
    "quantize-model --scheme w4afp8": ("quantize-model", "--scheme", "w4afp8"),
    "quantize-model --scheme int8": ("quantize-model", "--scheme", "int8"),
    "pack-for-cpu": ("pack-for-cpu",),
    "pack-for-cpu --tp 8": ("pack-for-cpu", "--tp", "8"),
    "pack-for-cpu --ep 8": ("pack-for-cpu", "--ep", "8"),
}
CHILD = """
import os, sys
import torch
sys.argv = ["tilewright", *sys.argv[1:]]
try:
    if len(sys.argv) > 1:
        from tilewright.cli.main import main
        main()
finally:
    times = os.times()
    status = open("/proc/self/status").read()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(f"cost {times.user + times.system:.2f} {peak / 1024:.0f}", file=sys.stderr)
"""


def layer(number: int, experts: int) -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of the tensors of one layer; the first is dense."""
    sizes = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    sizes |= {"self_attn.q_a_layernorm": 1536, "self_attn.kv_a_layernorm": 512}
    tensors = {f"{name}.weight": ("BF16", [size]) for name, size in sizes.items()}
    linears = {
        "self_attn.q_a_proj": (1536, HIDDEN),
        "self_attn.q_b_proj": (HEADS * 192, 1536),
        "self_attn.kv_a_proj_with_mqa": (576, HIDDEN),
        "self_attn.kv_b_proj": (HEADS * 256, 512),
        "self_attn.o_proj": (HIDDEN, HEADS * 128),
    }
    mlps = {"mlp": DENSE}
    if number:
        mlps = {"mlp.shared_experts": INNER} | {f"mlp.experts.{expert}": INNER for expert in range(experts)}
        tensors["mlp.gate.weight"] = ("BF16", [experts, HIDDEN])
        tensors["mlp.gate.e_score_correction_bias"] = ("F32", [experts])
    for name, inner in mlps.items():
        linears |= {f"{name}.gate_proj": (inner, HIDDEN), f"{name}.up_proj": (inner, HIDDEN)}
        linears[f"{name}.down_proj"] = (HIDDEN, inner)
    for name, (n, k) in linears.items():
        tensors[f"{name}.weight"] = ("F8_E4M3", [n, k])
        tensors[f"{name}.weight_scale_inv"] = ("F32", [-(-n // 128), -(-k // 128)])
    return {f"model.layers.{number}.{name}": spec for name, spec in tensors.items()}


def write(root: Path, layers: int, experts: int, shards: int = 62) -> int:
    """The checkpoint; returns its number of tensors."""
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": experts,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    (root / "config.json").write_text(json.dumps(config))
    tensors: dict[str, tuple[str, list[int]]] = {"model.embed_tokens.weight": ("BF16", [VOCABULARY, HIDDEN])}
    for number in range(layers):
        tensors |= layer(number, experts)
    tensors |= {"model.norm.weight": ("BF16", [HIDDEN]), "lm_head.weight": ("BF16", [VOCABULARY, HIDDEN])}
    names, files = list(tensors), {}
    step = -(-len(names) // shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name in names[shard * step : (shard + 1) * step]:
            dtype, shape = tensors[name]
            start, end = end, end + SIZES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            files[name] = file
        content = json.dumps(header).encode()
        with (root / file).open("wb") as out:
            out.write(struct.pack("<Q", len(content)) + content)
            out.truncate(8 + len(content) + end)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return len(names)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=384)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        source.mkdir()
        print(f"{write(source, arguments.layers, arguments.experts)} tensors\n")
        print("| | CPU-seconds | peak MiB |\n|---|---|---|")
        for title, command in COMMANDS.items():
            words = [command[0], str(source), f"{folder}/none", *command[1:], "--dry-run"] if command else []
            done = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True)
            cost = [line for line in done.stderr.splitlines() if line.startswith("cost ")]
            assert cost, done.stderr
            _, seconds, peak = cost[0].split()
            print(f"| {title} | {seconds} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
