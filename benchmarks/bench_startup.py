"""Start-up: a packed checkpoint mapped and run, beside loading the plain one and packing it with the same code.

    python benchmarks/bench_startup.py --gigabytes 4 --results benchmarks/results/startup.json

Generates an int8 checkpoint of square matrices, packs it by the command line, and times in fresh processes, files warm:
from `load_packed` to the first output of a layer and of all layers; and from `load_file` through packing to the same.
Memory is anonymous resident memory (not shared, not given back under pressure) above that of the imported process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import tilewright
from tilewright.kernels.formats import INT8
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.modules import build_module
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.tensors import QTensor

SIZE = 4096
SHARD = 64  # matrices


def resident(kind: str) -> int:
    """Bytes of `RssAnon`, `RssFile` or `RssShmem` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def generate(root: Path, count: int) -> None:
    """A dense int8 checkpoint of `count` matrices."""
    root.mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "w8a8_int8"}}
    (root / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for start in range(0, count, SHARD):
        tensors = {}
        for number in range(start, min(start + SHARD, count)):
            name = f"model.layers.{number}.mlp.up_proj"
            tensors[f"{name}.weight"] = torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
            tensors[f"{name}.weight_scale"] = torch.rand(SIZE, 1) / 1000
        file = f"model-{start // SHARD:05}.safetensors"
        save_file(tensors, root / file)
        weight_map |= dict.fromkeys(tensors, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def mapped(root: Path) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The layers of a packed directory."""
    packed = tilewright.load_packed(root)
    return [packed[name] for name in packed]


def repacked(root: Path) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The layers of a plain directory, loaded and packed."""
    layers: list[Callable[[torch.Tensor], torch.Tensor]] = []
    layout = LAYOUTS["cpu-vnni-int8"]
    for file in sorted(root.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]:
            codes, scales = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale")
            packed = layout.pack(QTensor(INT8, codes, scales))
            layers.append(build_module(name, ModuleSpec(layout, INT8, (SIZE, SIZE)), packed))
    return layers


def measure(way: str, root: Path) -> dict[str, float]:
    """Seconds and bytes of one way, in this process."""
    x = torch.randn(1, SIZE).to(torch.bfloat16)
    before = resident("RssAnon")
    start = time.perf_counter()
    layers = {"mapped": mapped, "repacked": repacked}[way](root)
    layers[0](x)
    first = time.perf_counter() - start
    for layer in layers[1:]:
        layer(x)
    return {
        "first_output_s": first,
        "all_layers_s": time.perf_counter() - start,
        "anonymous_bytes": resident("RssAnon") - before,
        "file_bytes": resident("RssFile"),
    }


def in_fresh_process(way: str, root: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", way, "--root", str(root)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def machine() -> dict[str, str | int]:
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {
        "cpu": model.partition(":")[2].strip(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--measure", choices=("mapped", "repacked"), help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.root)))
        return
    count = max(1, round(options.gigabytes * 1e9 / SIZE**2))
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "plain", Path(folder) / "packed"
        generate(plain, count)
        subprocess.run([Path(sys.executable).with_name("pack-for-cpu"), plain, packed], check=True, env=os.environ)
        roots = {"mapped": packed, "repacked": plain}
        for root in roots.values():  # warm
            for file in root.glob("*.safetensors"):
                file.read_bytes()
        runs = {way: [in_fresh_process(way, root) for _ in range(2)][-1] for way, root in roots.items()}
        size = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    ratio = runs["repacked"]["first_output_s"] / runs["mapped"]["first_output_s"]
    document = {
        "machine": machine(),
        "command": " ".join(sys.argv),
        "packed_bytes": size,
        "times_faster": ratio,
        **runs,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.results:
        options.results.write_text(text + "\n")


if __name__ == "__main__":
    main()
