"""How the speed of the packed linears depends on the way they are cut for the caches (`Blocking` in cpu/table.h).

Varies one field at a time around the instruction set's own choice and prints microseconds for each kind.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from benchmarks.bench_linear import KINDS, Call, weights

from tilewright.kernels import ops

FIELDS = ["bf16_chunk", "int8_chunk", "folds", "streaming_bytes", "task_rows", "task_blocks", "prefetch"]
VALUES = {
    "bf16_chunk": [256, 512, 2048, 4096],
    "int8_chunk": [512, 1024, 4096, 8192],
    "folds": [1, 2],
    "streaming_bytes": [0, 1 << 19, 1 << 21, 1 << 23],
    "task_rows": [128, 512, 1024],
    "task_blocks": [2, 4, 16, 32],
    "prefetch": [0, 1],
}


def median(calls: list[Call], x: torch.Tensor, seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        calls[len(times) % len(calls)](x)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="4096x4096")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    args = parser.parse_args()
    n, k = (int(size) for size in args.shape.split("x"))
    calls = {kind: weights(kind, n, k, 512 << 20) for kind in args.kinds}
    print(f"{ops.isa()}, {n} x {k}, {torch.get_num_threads()} threads; microseconds of {', '.join(args.kinds)}")
    with torch.inference_mode():
        for m in args.tokens:
            x = torch.randn(m, k, dtype=torch.bfloat16)
            for field in ["own choice", *FIELDS, "own choice"]:
                for value in VALUES.get(field, [-1]):
                    torch.ops.tilewright.select_blocking([value if name == field else -1 for name in FIELDS])
                    taken = [f"{median(calls[kind], x, args.seconds):8.0f}" for kind in args.kinds]
                    print(f"M={m:5d} {field:>16} {value:8d} {' '.join(taken)}", flush=True)
    torch.ops.tilewright.select_blocking([])


if __name__ == "__main__":
    main()
