"""Time, CPU time and memory of conversions, beside a plain copy of the same files in the same run.

    python benchmarks/bench_convert.py --sizes 1 4 16 --results benchmarks/results/convert.md

Generates a mixture-of-experts checkpoint of each size, converts it by the command line, and deletes everything again.
Files are warm: they are read once before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, EXPERTS, HEADS, VOCABULARY = 2048, 768, 32, 16, 32_000
SCHEMES = ("block-fp8", "int8", "int4", "w4afp8")
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "head_dim": 128,
    "moe_intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Measured:
    """What one process took: seconds, CPU seconds, peak anonymous memory in bytes."""

    wall: float
    cpu: float
    memory: int


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}."
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (HEADS * 128, HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (512, HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (512, HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * 128),
        f"{prefix}mlp.gate.weight": (EXPERTS, HIDDEN),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }
    for expert in range(EXPERTS):
        base = f"{prefix}mlp.experts.{expert}."
        shapes[f"{base}gate_proj.weight"] = shapes[f"{base}up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{base}down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def generate(root: Path, size: int) -> int:
    """Write a checkpoint of about `size` bytes in shards of one layer; returns how many bytes of weights it has."""
    root.mkdir()
    pool = torch.empty(1 << 26, dtype=torch.bfloat16).normal_(0, 0.02)  # weights are windows of this
    generator = torch.Generator().manual_seed(1)

    def window(shape: tuple[int, ...]) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        start = int(torch.randint(len(pool) - count, (1,), generator=generator))
        return pool[start : start + count].reshape(shape).clone()

    outer = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    outer_size = 2 * VOCABULARY * HIDDEN * 2
    layer_size = sum(2 * int(torch.tensor(shape).prod()) for shape in layer_shapes(0).values())
    layers = max(round((size - outer_size) / layer_size), 1)
    weight_map: dict[str, str] = {}
    for number in range(layers + 1):
        shapes = layer_shapes(number) if number < layers else {**outer, "model.norm.weight": (HIDDEN,)}
        file = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        save_file({name: window(shape) for name, shape in shapes.items()}, root / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shapes, file)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    return sum(path.stat().st_size for path in root.glob("*.safetensors"))


def warm(root: Path) -> None:
    for path in root.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def measure(command: Sequence[str]) -> tuple[Measured, str]:
    """Run a command; anonymous memory is sampled every 10 ms. Returns also what it wrote to stderr."""
    peak = 0
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    stop = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.01):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) << 10)

    sampler = threading.Thread(target=sample)
    sampler.start()
    assert process.stderr
    messages = process.stderr.read()
    _, code, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(code)
    stop.set()
    sampler.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{messages.decode()}")
    return Measured(wall, usage.ru_utime + usage.ru_stime, peak), messages.decode()


def copy(source: Path, target: Path) -> Measured:
    """`cp -r` and a sync of what it wrote."""
    copied, _ = measure(["cp", "-r", str(source), str(target)])
    synced, _ = measure(["sync", *map(str, target.iterdir()), str(target)])
    shutil.rmtree(target)
    return Measured(copied.wall + synced.wall, copied.cpu + synced.cpu, 0)


# Times everything but the import of torch, in the process itself: a separate measurement would differ from run to run.
TIMED = """
import time, sys, torch
wall, cpu = time.perf_counter(), time.process_time()
from tilewright.cli.main import quantize_model
try:
    quantize_model()
finally:
    print("took", time.perf_counter() - wall, time.process_time() - cpu, file=sys.stderr)
"""


def convert(source: Path, target: Path, scheme: str, solver: str) -> Measured:
    """One conversion by the command line, less `import torch`."""
    arguments = [str(source), str(target), "--scheme", scheme, "--solver", solver]
    whole, messages = measure([sys.executable, "-c", TIMED, *arguments])
    shutil.rmtree(target)
    _, wall, cpu = messages.splitlines()[-1].split()
    return Measured(float(wall), float(cpu), whole.memory)


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    cpus = len(os.sched_getaffinity(0))
    return f"{model}, {cpus} CPUs, torch {torch.__version__}, commit {commit.stdout.strip() or 'unknown'}"


def run(sizes: Sequence[float], schemes: Sequence[str], solver: str, folder: Path) -> list[str]:
    """The lines of the report; each is printed as soon as it is known."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say(f"Machine: {machine()}.\n\nCommand: `python benchmarks/bench_convert.py {' '.join(sys.argv[1:])}`.\n")
    say("`wall` and `CPU-s` leave out `import torch`; everything else counts, hashing and fsync too.\n")
    say("| source GB | scheme | wall s | cp + sync s | ratio | CPU-s/GB | peak anonymous MiB |\n" + "|---" * 7 + "|")
    cpu: dict[str, dict[float, float]] = {scheme: {} for scheme in schemes}
    for size in sizes:
        source = folder / "source"
        gigabytes = generate(source, round(size * 1e9)) / 1e9
        for scheme in schemes:
            warm(source)
            plain = copy(source, folder / "copy")
            took = convert(source, folder / "output", scheme, solver)
            cpu[scheme][gigabytes] = took.cpu
            say(
                f"| {gigabytes:.2f} | {scheme} | {took.wall:.2f} | {plain.wall:.2f} | {took.wall / plain.wall:.2f} "
                f"| {cpu[scheme][gigabytes] / gigabytes:.2f} | {took.memory / 2**20:.0f} |"
            )
        shutil.rmtree(source)
    if len(sizes) > 1:
        say(f"\nSlope between {sizes[-2]:g} and {sizes[-1]:g} GB, in CPU-s/GB:\n")
        for scheme, times in cpu.items():
            (small, least), (large, most) = sorted(times.items())[-2:]
            say(f"- {scheme}: {(most - least) / (large - small):.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 4.0], help="GB of source")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--solver", default="rtn")
    parser.add_argument("--folder", type=Path, help="where to write; needs about three times the largest size")
    parser.add_argument("--results", type=Path, help="Markdown file for the report")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 3.2e9 * max(arguments.sizes):
            raise SystemExit(f"{folder}: {free / 1e9:.0f} GB are free, three times the largest size is needed")
        lines = run(arguments.sizes, arguments.schemes, arguments.solver, Path(folder))
    if arguments.results:
        arguments.results.write_text("# Conversion\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
