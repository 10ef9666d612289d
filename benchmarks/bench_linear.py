"""Speed of the packed linears beside torch's own bf16 `F.linear`, the read bandwidth and the AMX peak of the machine.

    python benchmarks/bench_linear.py --out benchmarks/results/cpu-NAME

writes NAME.json, NAME.md and, where matplotlib is there, NAME.png. Everything is measured in one process, the kinds
interleaved; weights rotate through `--rotate` MiB, so that none is in a cache when its turn comes. Times are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tilewright.kernels import ops

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (7168, 2048), (2112, 7168), (24576, 1536), (1024, 2048)]
TOKENS = [1, 4, 16, 64, 256, 1024]
KINDS = ["bf16", "int8", "fp8", "int4", "int4-bf16"]
MORE_KINDS = ["int4-g32", "int4-g32-bf16", "mxfp4"]  # int4 in groups of 128 elsewhere
BITS = {"bf16": 16.0, "int8": 8.0, "fp8": 8.0, "int4": 4.5, "int4-bf16": 4.5, "torch-bf16": 16.0, "torch-fp32": 32.0}
BITS |= {"int4-g32": 6.25, "int4-g32-bf16": 6.25, "mxfp4": 4.25}
Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Result:
    """Median of one case and the limits measured in the same run."""

    n: int
    k: int
    m: int
    kind: str
    microseconds: float
    share_of_bandwidth: float
    share_of_peak: float | None
    times_torch: float


class Probes:
    """Limits of the machine, probed again whenever asked."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = _compile("probes.cpp", Path(folder), ["-O3", "-march=native", "-fopenmp"])
            self._library = ctypes.CDLL(str(library))
        self._data = torch.ones(512 << 20, dtype=torch.uint8)
        self.has_tiles = hasattr(self._library, "products_int8") and ops.isa() == "amx"

    def bandwidth(self) -> float:
        """Bytes per second read from memory by all threads."""
        pointer, size = ctypes.c_void_p(self._data.data_ptr()), ctypes.c_size_t(self._data.numel())
        return self._data.numel() / _best(lambda: self._library.read_memory(pointer, size), 5)

    def peak(self, kind: str, threads: int | None = None) -> float | None:
        """Operations (two per multiply-add) per second of tile products in registers, on all threads or some."""
        if not self.has_tiles:
            return None
        steps, int8 = 100_000, kind in {"int8", "int4", "int4-g32"}
        count = threads or self._library.threads()
        probe = self._library.products_int8 if int8 else self._library.products_bf16
        seconds = _best(lambda: probe(ctypes.c_int64(steps), count), 3)
        return count * steps * 4 * 16 * 16 * (64 if int8 else 32) * 2 / seconds


def _compile(name: str, folder: Path, options: list[str]) -> Path:
    library = folder / Path(name).with_suffix(".so")
    command = ["g++", "-shared", "-fPIC", str(Path(__file__).with_name(name)), "-o", str(library), *options]
    subprocess.run(command, check=True)
    return library


def _best(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def _random_bytes(count: int) -> torch.Tensor:
    # 0x3f in the top: no NaN and no infinity among bf16 and FP8 codes, magnitudes below 2
    return torch.randint(0, 256, (count,), dtype=torch.uint8) & 0xBF


def weights(kind: str, n: int, k: int, rotate: int) -> list[Call]:
    """Calls of one kind on so many different weights that they fill `rotate` bytes."""
    copies = max(2, -(-rotate // int(n * k * BITS[kind] / 8)))
    bias = torch.zeros(n)
    calls: list[Call] = []
    pool = _random_bytes(n * (k + 4) * 2)
    for _ in range(copies):
        if kind == "torch-fp32":
            w32 = pool[: n * k * 2].view(torch.bfloat16).float().view(n, k)
            calls.append(lambda x, w=w32: F.linear(x.float(), w).bfloat16())
        elif kind in {"bf16", "torch-bf16"}:
            w = pool[: n * k * 2].view(torch.bfloat16).view(n, k).clone()
            if kind == "bf16":
                calls.append(lambda x, w=w: ops.linear_bf16(x, w, n, bias))
            else:
                calls.append(lambda x, w=w: F.linear(x, w))
        elif kind == "int8":
            w, s = pool[: n * (k + 4)].view(torch.int8).view(n, k + 4).clone(), torch.rand(n)
            calls.append(lambda x, w=w, s=s: ops.linear_int8(x, w, s, n, bias))
        elif kind == "fp8":
            w = pool[: n * k].view(torch.float8_e4m3fn).view(n, k).clone()
            s = torch.rand(-(-n // 128), -(-k // 128))
            calls.append(lambda x, w=w, s=s: ops.linear_fp8(x, w, s, n, bias))
        elif kind == "mxfp4":
            w = pool[: n * k * 17 // 32].view(n // 32, k // 64, 1088).clone()
            w[..., :64] = torch.randint(110, 130, (n // 32, k // 64, 64), dtype=torch.uint8)
            calls.append(lambda x, w=w: ops.linear_mxfp4(x, w, n, bias))
        else:
            group = 32 if "g32" in kind else 128
            w = pool[: n * k // 2 + n * k // group * 4].view(n // 32, k // group, group * 16 + 128).clone()
            z, s = torch.full((n // 32, k // group, 32), 8, dtype=torch.int8), torch.rand(n // 32, k // group, 32)
            a8 = not kind.endswith("bf16")
            calls.append(lambda x, w=w, z=z, s=s, a8=a8: ops.linear_int4(x, w, z, s, n, bias, a8))
    return calls


def measure(calls: dict[str, list[Call]], x: torch.Tensor, seconds: float) -> dict[str, float]:
    """Median seconds of each kind; kinds take turns, each turn a few consecutive weights."""
    position = dict.fromkeys(calls, 0)
    times: dict[str, list[float]] = {kind: [] for kind in calls}

    def turn(kind: str, count: int) -> None:
        for _ in range(count):
            call = calls[kind][position[kind] % len(calls[kind])]
            position[kind] += 1
            start = time.perf_counter()
            call(x)
            times[kind].append(time.perf_counter() - start)

    for kind in calls:
        turn(kind, 2)
    per_turn = {kind: max(1, min(8, int(0.02 / min(taken)))) for kind, taken in times.items()}
    times = {kind: [] for kind in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(times[next(iter(calls))]) < 3:
        for kind in calls:
            turn(kind, per_turn[kind])
    return {kind: statistics.median(taken) for kind, taken in times.items()}


def run(args: argparse.Namespace, probes: Probes) -> list[Result]:
    results = []
    yardsticks = ["torch-bf16"] if ops.isa() == "amx" else ["torch-bf16", "torch-fp32"]
    for n, k in args.shapes:
        calls = {kind: weights(kind, n, k, args.rotate << 20) for kind in [*yardsticks, *args.kinds]}
        for m in args.tokens:
            x = torch.randn(m, k, dtype=torch.bfloat16)
            bandwidth = probes.bandwidth()
            peaks = {kind: probes.peak(kind) if m >= 64 else None for kind in args.kinds}
            medians = measure(calls, x, args.seconds)
            torch_time = min(medians[kind] for kind in yardsticks)
            for kind, median in medians.items():
                peak = peaks.get(kind)
                share = n * k * BITS[kind] / 8 / median / bandwidth
                of_peak = 2 * m * n * k / median / peak if peak else None
                results.append(Result(n, k, m, kind, median * 1e6, share, of_peak, torch_time / median))
            line = "  ".join(
                f"{kind} {median * 1e6:.0f}us x{torch_time / median:.2f}" for kind, median in medians.items()
            )
            print(f"{n}x{k} M={m}: {bandwidth / 1e9:.0f} GB/s  {line}", flush=True)
    return results


def overhead() -> dict[str, float]:
    """Microseconds of calls that hardly compute, and of one with the same signature that only makes its result."""
    root = Path(torch.__path__[0])
    options = ["-O2", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020A000000000000ULL", "-isystem", str(root / "include")]
    with tempfile.TemporaryDirectory() as folder:
        library = _compile("empty_op.cpp", Path(folder), [*options, f"-L{root / 'lib'}", "-ltorch_cpu"])
        torch.ops.load_library(library)
    w, s = torch.zeros(32, 36, dtype=torch.int8), torch.ones(32)
    calls = {
        "an empty operator": (torch.ops.tilewright_bench.empty_linear, 1),
        "no rows": (torch.ops.tilewright.linear_int8, 0),
        "one row of 32 x 32": (torch.ops.tilewright.linear_int8, 1),
    }
    taken = dict.fromkeys(calls, float("inf"))
    for _ in range(30):
        for name, (call, m) in calls.items():
            x = torch.zeros(m, 32, dtype=torch.bfloat16)
            batch = _best(lambda: [call(x, w, s, 32) for _ in range(200)], 1)  # noqa: B023
            taken[name] = min(taken[name], batch / 200 * 1e6)
    return taken


def machine() -> dict[str, str | int]:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": found.group(1) if found else platform.processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "isa": ops.isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT") or commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def markdown(about: dict[str, str | int], extra: dict[str, float], results: list[Result], command: str) -> str:
    lines = [f"# Packed linear on {about['cpu']}, {about['isa']}", "", f"`{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [f"- call with {key}: {value:.1f} us" for key, value in extra.items()]
    tables = {
        "Times faster than torch (the faster of its bf16 and, below AVX-512, fp32)": lambda r: f"{r.times_torch:.2f}",
        "Microseconds": lambda r: f"{r.microseconds:.0f}",
        "Share of the read bandwidth": lambda r: f"{r.share_of_bandwidth:.0%}",
        "Share of the AMX peak": lambda r: "" if r.share_of_peak is None else f"{r.share_of_peak:.0%}",
    }
    kinds = list(dict.fromkeys(result.kind for result in results))
    for title, cell in tables.items():
        lines += ["", f"## {title}", "", "| N, K | M | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
        cases = dict.fromkeys((r.n, r.k, r.m) for r in results)
        for case in cases:
            row = {r.kind: cell(r) for r in results if (r.n, r.k, r.m) == case}
            lines.append(f"| {case[0]}, {case[1]} | {case[2]} | " + " | ".join(row[kind] for kind in kinds) + " |")
    return "\n".join(lines) + "\n"


def plot(path: Path, results: list[Result], bandwidth: float, peak: float | None) -> None:
    """Operations per second over operations per byte of weight, below the two limits."""
    import matplotlib  # noqa: PLC0415, I001

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for kind in dict.fromkeys(result.kind for result in results):
        mine = [r for r in results if r.kind == kind]
        intensity = [2 * r.m / (BITS[kind] / 8) for r in mine]
        axes.scatter(intensity, [2 * r.m * r.n * r.k / r.microseconds / 1e6 for r in mine], s=12, label=kind)
    span = [0.5, 4096.0]
    axes.plot(span, [bandwidth * i / 1e12 for i in span], "k--", linewidth=0.8, label="read bandwidth")
    if peak:
        axes.axhline(peak / 1e12, color="k", linewidth=0.8, label="int8 peak")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of weight", ylabel="TOP/s")
    axes.legend()
    figure.savefig(path, dpi=120)


def shape_of(text: str) -> tuple[int, int]:
    n, k = text.split("x")
    return int(n), int(k)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    parser.add_argument("--out", type=Path, help="path of the results without suffix")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="M")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=[*KINDS, *MORE_KINDS])
    parser.add_argument("--rotate", type=int, default=640, help="MiB of weights of each kind")
    parser.add_argument("--seconds", type=float, default=0.25, help="for each kind of each case")
    return parser.parse_args()


def main() -> None:
    args = parse()
    probes = Probes()
    with torch.inference_mode():
        results = run(args, probes)
        extra = overhead()
    about = machine()
    command = "python benchmarks/bench_linear.py " + " ".join(sys.argv[1:])
    text = markdown(about, extra, results, command)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": about, "overhead_us": extra, "results": [asdict(result) for result in results]}
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)
        try:
            plot(args.out.with_suffix(".png"), results, probes.bandwidth(), probes.peak("int8"))
        except ImportError:
            print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
