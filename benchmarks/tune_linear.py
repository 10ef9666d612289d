"""How the speed of the packed linears depends on the way they are cut for the caches (`Blocking` in cpu/table.h).

    python -m benchmarks.tune_linear --shapes 4096x4096 14336x4096 --tokens 1 16 256 1024

Variants and torch's bf16 `F.linear` take turns in one process. Prints the limits of the machine, the time that
preparing the activations takes (a layer of 32 outputs does nothing else), and microseconds and times torch by kind.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from benchmarks.bench_linear import KINDS, Call, Probes, shape_of, weights

from tilewright.kernels import ops

FIELDS = [
    "bf16_chunk",
    "int8_chunk",
    "streaming_bytes",
    "task_rows",
    "task_blocks",
    "weights_ahead",
    "l1_k_bytes",
    "n_blocks_per_pass",
]
OWN: dict[str, int] = {}
AHEAD = [OWN, *({"weights_ahead": size} for size in (0, 1024, 2048, 8192, 16384))]
FEW_ROWS = [*AHEAD, {"l1_k_bytes": 0}, {"l1_k_bytes": 256}]
MANY_ROWS = [
    OWN,
    *({"l1_k_bytes": size} for size in (0, 64, 256, 512)),
    *({"l1_k_bytes": size, "n_blocks_per_pass": 2} for size in (64, 128, 256)),
    *({"bf16_chunk": columns, "int8_chunk": 2 * columns} for columns in (256, 1024, 2048, 4096)),
    *({"task_rows": rows} for rows in (128, 512)),
    *({"task_blocks": blocks} for blocks in (2, 4, 16)),
    {"weights_ahead": 0},
    {"streaming_bytes": 0},
    {"streaming_bytes": 1 << 23},
]
Variant = dict[str, int]


def select(variant: Variant) -> None:
    torch.ops.tilewright.select_blocking([variant.get(field, -1) for field in FIELDS])


def timed(calls: list[Call], x: torch.Tensor, count: int, position: int) -> list[float]:
    times = []
    for i in range(count):
        start = time.perf_counter()
        calls[(position + i) % len(calls)](x)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def compare(calls: dict[str, list[Call]], x: torch.Tensor, variants: list[Variant], seconds: float) -> None:
    """Prints medians of every variant, `seconds` for each kind and variant, in three rounds."""
    torch_times: list[float] = []
    times: dict[tuple[int, str], list[float]] = {}
    for _ in range(3):
        for index, variant in enumerate(variants):
            select(variant)
            torch_times += timed(calls["torch-bf16"], x, 2, len(torch_times))
            for kind, kind_calls in calls.items():
                if kind == "torch-bf16":
                    continue
                mine = times.setdefault((index, kind), [])
                count = max(2, min(20, int(seconds * 1e6 / 3 / timed(kind_calls, x, 1, len(mine))[0])))
                mine += timed(kind_calls, x, count, len(mine) + 1)
    select(OWN)
    yardstick = statistics.median(torch_times)
    print(f"M={x.shape[0]} torch {yardstick:.0f} us (lower quartile {statistics.quantiles(torch_times)[0]:.0f})")
    for index, variant in enumerate(variants):
        name = " ".join(f"{field}={value}" for field, value in variant.items()) or "own choice"
        cells = []
        for kind in calls:
            if kind != "torch-bf16":
                median = statistics.median(times[index, kind])
                cells.append(f"{kind} {median:6.0f} x{yardstick / median:.2f}")
        print(f"  {name:>36} {'  '.join(cells)}", flush=True)


def limits(probes: Probes) -> None:
    print(f"{ops.isa()}, {torch.get_num_threads()} threads, read bandwidth {probes.bandwidth() / 1e9:.0f} GB/s", end="")
    for kind in ("int8", "bf16"):
        for threads in (1, torch.get_num_threads()):
            peak = probes.peak(kind, threads)
            if peak:
                print(f", {kind} peak of {threads}: {peak / 1e12:.1f} TOP/s", end="")
    print(flush=True)


def preparation(k: int, tokens: int, kinds: list[str]) -> None:
    calls = {kind: weights(kind, 32, k, 0) for kind in kinds}
    x = torch.randn(tokens, k, dtype=torch.bfloat16)
    cells = [f"{kind} {statistics.median(timed(calls[kind], x, 15, 0)):.0f}" for kind in kinds]
    print(f"N=32 K={k} M={tokens}: {', '.join(cells)} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=[(4096, 4096)], metavar="NxK")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--seconds", type=float, default=0.03, help="for each kind of each variant")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--rotate", type=int, default=400, help="MiB of weights of each kind")
    args = parser.parse_args()
    probes = Probes()
    with torch.inference_mode():
        for n, k in args.shapes:
            calls = {kind: weights(kind, n, k, args.rotate << 20) for kind in ["torch-bf16", *args.kinds]}
            print(f"N={n} K={k}")
            for m in args.tokens:
                limits(probes)
                if m >= 256:
                    preparation(k, m, args.kinds)
                x = torch.randn(m, k, dtype=torch.bfloat16)
                compare(calls, x, AHEAD if m == 1 else FEW_ROWS if m <= 64 else MANY_ROWS, args.seconds)
        limits(probes)


if __name__ == "__main__":
    main()
