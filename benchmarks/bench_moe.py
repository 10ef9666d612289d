"""Speed of the fused experts beside a plain torch loop in bf16, the read bandwidth and the AMX peak of the machine.

    python benchmarks/bench_moe.py --out benchmarks/results/moe-NAME

writes NAME.json and NAME.md. Everything is measured in one process, the kinds interleaved. Experts are dealt from a
shuffled deck and stacks take turns, so that `--rotate` MiB are read before a weight comes again: none is in a cache
then. Weights are random bytes in their packed shapes. Times are medians; shares are medians over calls of what a call
had to read or to multiply, by its own routing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_linear import BITS, Probes, machine

from tilewright.kernels import ops
from tilewright.kernels.ops import experts as ops_experts

TOKENS = [1, 8, 64, 512]
KINDS = ["bf16", "int8", "fp8", "int4", "int4-bf16"]
POOL = 1 << 26


@dataclass(frozen=True)
class Shape:
    """Experts of a layer, of which the first `local` are here."""

    experts: int
    local: int
    top_k: int
    hidden: int
    inner: int

    @property
    def products(self) -> int:
        """Multiply-adds of one routed row, and elements of one expert."""
        return 3 * self.hidden * self.inner

    def __str__(self) -> str:
        here = f"{self.local} of {self.experts}" if self.local < self.experts else f"{self.experts}"
        return f"{here} experts, top {self.top_k}, {self.hidden} x {self.inner}"


SHAPES = [Shape(64, 64, 6, 2048, 1408), Shape(128, 128, 8, 2048, 768), Shape(256, 32, 8, 7168, 2048)]


@dataclass(frozen=True)
class Batch:
    """Tokens with their routing; `rows` and `active` count what falls to the experts that are here."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    rows: int
    active: int


Call = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Result:
    """Median of one case and the limits measured in the same run; operations are two per multiply-add."""

    shape: str
    m: int
    kind: str
    microseconds: float
    share_of_bandwidth: float
    tera_operations: float
    share_of_peak: float | None
    times_torch: float | None


def deal(shape: Shape, m: int, count: int) -> list[Batch]:
    """Batches whose choices come from a deck that is shuffled anew when it runs out."""
    cards = count * m * shape.top_k
    decks = -(-cards // shape.experts)
    deck = torch.cat([torch.randperm(shape.experts) for _ in range(decks)])[:cards].view(count, m, shape.top_k)
    batches = []
    for ids in deck:
        here = ids[ids < shape.local]
        x = torch.randn(m, shape.hidden, dtype=torch.bfloat16)
        weights = torch.rand(m, shape.top_k)
        batches.append(Batch(x, weights, ids.contiguous(), len(here), len(here.unique())))
    return batches


def random_bytes(pool: torch.Tensor, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    wanted = dtype.itemsize
    for size in sizes:
        wanted *= size
    flat = torch.empty(wanted, dtype=torch.uint8)
    for start in range(0, wanted, len(pool)):
        part = flat[start : start + len(pool)]
        part.copy_(pool[: len(part)])
    return flat.view(dtype).view(sizes)


def torch_loop(shape: Shape, w13: torch.Tensor, w2: torch.Tensor) -> Call:
    """Expert after expert, as models without fused kernels run."""

    def call(b: Batch) -> torch.Tensor:
        total = torch.zeros_like(b.x)
        for e in b.ids[b.ids < shape.local].unique().tolist():
            token, slot = torch.where(b.ids == e)
            gate, up = F.linear(b.x[token], w13[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, w2[e]) * b.weights[token, slot, None]
            total.index_add_(0, token, y.to(total.dtype))
        return total

    return call


def stack(kind: str, shape: Shape, pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random packed experts; every size here is a multiple of 128."""
    e, h, i = shape.local, shape.hidden, shape.inner
    made: dict[str, torch.Tensor] = {}
    for name, n, k in (("w13", 2 * i, h), ("w2", h, i)):
        if kind == "bf16":
            made[name] = random_bytes(pool, torch.bfloat16, e, n, k)
        elif kind == "int8":
            made |= {name: random_bytes(pool, torch.int8, e, n, k + 4), f"{name}_scale": torch.rand(e, n, 1) * 1e-3}
        elif kind == "fp8":
            made[name] = random_bytes(pool, torch.float8_e4m3fn, e, n, k)
            made[f"{name}_scale"] = torch.rand(e, n // 128, k // 128) * 1e-3
        else:
            grid = (e, n // 32, k // 128, 32)
            made[name] = random_bytes(pool, torch.uint8, e, n // 32, k // 128, 2176)
            made |= {f"{name}_scale": torch.rand(grid) * 1e-3, f"{name}_zeros": torch.full(grid, 8, dtype=torch.int8)}
    return made


def calls_of(kinds: list[str], shape: Shape, rotate: int) -> dict[str, list[Call]]:
    """For each kind the calls on so many stacks that they fill `rotate` bytes; `torch` shares those of bf16."""
    pool = torch.randint(0, 256, (POOL,), dtype=torch.uint8) & 0xBF  # no NaN, no infinity, magnitudes below 2
    made: dict[str, list[Call]] = {}
    for kind in kinds:
        if kind == "int4-bf16" and "int4" in made:
            continue
        copies = max(1, -(-rotate // int(shape.local * shape.products * BITS[kind] / 8)))
        for _ in range(copies):
            tensors = stack(kind, shape, pool)
            for name, int8 in (("int4", True), ("int4-bf16", False)) if kind.startswith("int4") else ((kind, True),):
                if name in kinds:
                    made.setdefault(name, []).append(
                        lambda b, t=tensors, int8=int8: ops_experts.fused_experts(
                            b.x, b.weights, b.ids, inner=shape.inner, int8_activations=int8, **t
                        )
                    )
            if kind == "bf16":
                made.setdefault("torch", []).append(torch_loop(shape, tensors["w13"], tensors["w2"]))
    return made


def measure(calls: dict[str, list[Call]], batches: list[Batch], seconds: float) -> dict[str, list[tuple[float, Batch]]]:
    """Seconds of each call; kinds take turns, at least three calls each."""
    taken: dict[str, list[tuple[float, Batch]]] = {kind: [] for kind in calls}
    spent = dict.fromkeys(calls, 0.0)
    turn = 0
    while any(len(taken[kind]) < 4 or spent[kind] < seconds for kind in calls):
        batch = batches[turn % len(batches)]
        turn += 1
        if not batch.rows:
            continue
        for kind, stacks in calls.items():
            if len(taken[kind]) >= 4 and spent[kind] >= seconds:
                continue
            start = time.perf_counter()
            stacks[turn % len(stacks)](batch)
            took = time.perf_counter() - start
            spent[kind] += took
            taken[kind].append((took, batch))
    return {kind: times[1:] for kind, times in taken.items()}  # the first one finds its memory unmapped


def results_of(
    shape: Shape, m: int, taken: dict[str, list[tuple[float, Batch]]], bandwidth: float, peaks: dict[str, float | None]
) -> list[Result]:
    results = []
    medians = {kind: statistics.median(t for t, _ in times) for kind, times in taken.items()}
    for kind, times in taken.items():
        size = shape.products * BITS["bf16" if kind == "torch" else kind] / 8
        share = statistics.median(b.active * size / t for t, b in times) / bandwidth
        operations = statistics.median(2 * b.rows * shape.products / t for t, b in times)
        peak = peaks.get(kind)
        times_torch = medians["torch"] / medians[kind] if "torch" in medians else None
        of_peak = operations / peak if peak else None
        results.append(Result(str(shape), m, kind, medians[kind] * 1e6, share, operations / 1e12, of_peak, times_torch))
    return results


def run(args: argparse.Namespace, probes: Probes) -> list[Result]:
    results = []
    for number in args.shapes:
        shape = SHAPES[number]
        calls = calls_of(args.kinds, shape, args.rotate << 20)
        for m in args.tokens:
            batches = deal(shape, m, 64 if m <= 8 else 8)
            bandwidth = probes.bandwidth()
            peaks = {kind: probes.peak(kind) for kind in args.kinds}
            found = results_of(shape, m, measure(calls, batches, args.seconds), bandwidth, peaks)
            results += found
            line = "  ".join(
                f"{r.kind} {r.microseconds:.0f}us {r.share_of_bandwidth:.0%} {r.tera_operations:.2f}" for r in found
            )
            print(f"{shape}, M={m}: {bandwidth / 1e9:.0f} GB/s  {line}", flush=True)
    return results


def markdown(about: dict[str, str | int], extra: dict[str, float], results: list[Result], command: str) -> str:
    lines = [f"# Fused experts on {about['cpu']}, {about['isa']}", "", f"`{command}`", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [f"- {key}: {value:.3g}" for key, value in extra.items()]
    lines += ["", "`read` is the share of the read bandwidth, `peak` that of the AMX peak.", ""]
    head = "| layer | M | kind | us | read | TOP/s | peak | x torch |"
    lines += [head, "|---" * head.count(" | ") + "|---|"]
    for r in results:
        peak = f"{r.share_of_peak:.0%}" if r.share_of_peak else ""
        times = f"{r.times_torch:.1f}" if r.times_torch else ""
        lines.append(
            f"| {r.shape} | {r.m} | {r.kind} | {r.microseconds:.0f} | {r.share_of_bandwidth:.0%} "
            f"| {r.tera_operations:.2f} | {peak} | {times} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write, without the suffix")
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="numbers of layers")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each case")
    parser.add_argument("--rotate", type=int, default=1024, help="MiB of weights that take turns")
    args = parser.parse_args()
    torch.manual_seed(0)
    probes = Probes()
    about, extra = machine(), {"read bandwidth, GB/s": probes.bandwidth() / 1e9}
    for name, kind in (("int8 peak, TOP/s", "int8"), ("bf16 peak, TOP/s", "bf16")):
        if peak := probes.peak(kind):
            extra[name] = peak / 1e12
    print(about, extra, ops.isa(), flush=True)
    results = run(args, probes)
    text = markdown(about, extra, results, "python " + " ".join(sys.argv))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(text)
        rows = [asdict(result) for result in results]
        args.out.with_suffix(".json").write_text(json.dumps({**about, **extra, "results": rows}, indent=1) + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
