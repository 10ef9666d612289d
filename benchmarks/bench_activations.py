"""What scales of int8 activations by group, and rotations, cost: each beside the same call by token, in one process.

    python -m benchmarks.bench_activations --shapes 4096x4096 14336x4096 --tokens 1 16 256 1024

Variants take turns on weights that rotate through `--rotate` MiB. Prints the least time of each and its ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from benchmarks.bench_linear import shape_of

from tilewright.kernels import ops

Call = Callable[[torch.Tensor, int], torch.Tensor]
VARIANTS = [(0, 0), (64, 0), (128, 0), (0, 64), (64, 64)]  # columns of a group, of a block of the rotation


def calls(kind: str, n: int, k: int, copies: int) -> list[Call]:
    """The variants of one kind of weight."""
    if kind == "int8":
        weights = [torch.randint(-127, 128, (n, k + 4), dtype=torch.int8) for _ in range(copies)]
        scale = torch.rand(n)
        return [
            lambda x, i, g=g, r=r: ops.linear_int8(x, weights[i % copies], scale, n, None, g, r) for g, r in VARIANTS
        ]
    nibbles = [torch.randint(0, 256, (n // 32, k // 128, 2176), dtype=torch.uint8) for _ in range(copies)]
    zeros, scales = torch.full((n // 32, k // 128, 32), 8, dtype=torch.int8), torch.rand(n // 32, k // 128, 32)
    return [
        lambda x, i, g=g, r=r: ops.linear_int4(x, nibbles[i % copies], zeros, scales, n, None, True, g, r)
        for g, r in VARIANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=[(4096, 4096)], metavar="NxK")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 1024], metavar="M")
    parser.add_argument("--rotate", type=int, default=640, help="MiB of weights of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each line")
    args = parser.parse_args()
    print(f"{ops.isa()}, {torch.get_num_threads()} threads; group/rotation: microseconds, ratio to 0/0")
    for n, k in args.shapes:
        for kind in ("int8", "int4"):
            variants = calls(kind, n, k, max(2, (args.rotate << 20) // (n * k)))
            for m in args.tokens:
                x = torch.randn(m, k, dtype=torch.bfloat16)
                best, turn = [float("inf")] * len(variants), 0
                end = time.perf_counter() + args.seconds
                while time.perf_counter() < end or turn < 3 * len(variants):
                    start = time.perf_counter()
                    variants[turn % len(variants)](x, turn)
                    best[turn % len(variants)] = min(best[turn % len(variants)], time.perf_counter() - start)
                    turn += 1
                cells = (f"{g}/{r}: {t * 1e6:.0f}, {t / best[0]:.3f}" for (g, r), t in zip(VARIANTS, best, strict=True))
                print(f"{kind} {n}x{k} M={m}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
