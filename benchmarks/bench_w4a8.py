"""Times the W4A8 grouped product and the whole MoE layer on one Hopper GPU, beside the card's own limits.

    python benchmarks/bench_w4a8.py --out results.json

Times are medians of CUDA graph replays and hold everything that a call does on the device. Ceilings, torch's grouped
products and the rows below are measured in the same run. Every product is checked against float64 first.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from tilewright.kernels.gpu import reference
from tilewright.kernels.gpu.grouped import w4a8_grouped_mm
from tilewright.kernels.gpu.moe import w4a8_fused_experts

EXPERTS = 32
SHAPES = ((4096, 7168), (7168, 2048))
ROWS = (32, 256, 1024, 2048, 4096, 16384)
SPREADS = ("even", "routed", "zipf")
FP8 = torch.float8_e4m3fn


def graph_time(call: Callable[[], Any], calls: int = 10, replays: int = 9) -> float:
    """Microseconds of one call: the median over replays of a graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls * 1e3)
    return sorted(times)[replays // 2]


def ceilings() -> dict[str, float]:
    """Bandwidth in GB/s of a copy (read plus written) and of reading alone, TFLOP/s of one large FP8 product."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = graph_time(lambda: target.copy_(source), 2)
    words = source.view(torch.int64)
    read = graph_time(words.amax, 2)
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(FP8) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = graph_time(lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True), 5)
    return {
        "copy_gbps": 2 * source.numel() / copy / 1e3,
        "read_gbps": source.numel() / read / 1e3,
        "fp8_tflops": 2 * size**3 / product / 1e6,
    }


def spread(rows: int, distribution: str) -> torch.Tensor:
    """Rows of each expert: the same for all, each to a random expert (routed), or by 1 / rank (Zipf)."""
    if distribution == "even":
        return torch.full((EXPERTS,), rows // EXPERTS)
    if distribution == "routed":
        ids = torch.randint(0, EXPERTS, (rows,), generator=torch.Generator().manual_seed(3))
        return ids.bincount(minlength=EXPERTS)
    share = 1 / torch.arange(1, EXPERTS + 1)
    counts = (share / share.sum() * rows).floor().long()
    counts[0] += rows - counts.sum()
    return counts[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))]


def random_weight(experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tiles and scales of layout `gpu-hopper-w4`: any byte is a pair of weights."""
    tiles = torch.randint(0, 256, (experts, n // 64, k // 128, 64, 64), dtype=torch.uint8, device="cuda")
    return tiles, (torch.rand(experts, k // 128, n, device="cuda") * 0.02 + 0.002).to(torch.bfloat16)


def grouped_case(
    n: int, k: int, rows: int, distribution: str, weight: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any]:
    """Error and time of one product."""
    counts = spread(rows, distribution)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32).cuda()
    x = torch.randn(rows, k, device="cuda")
    scale = reference.activation_scales(x, "tensor", None)
    args = reference.quantize(x, scale), *weight, offsets, scale
    poison = torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    del poison
    got, want = w4a8_grouped_mm(*args), reference.grouped_mm(*args)
    error = float((got.double() - want).norm() / want.norm())
    assert error < 2e-3, f"N {n}, K {k}, {rows} rows, {distribution}: relative error {error:.1e}"
    micros = graph_time(lambda: w4a8_grouped_mm(*args), 20 if rows < 4096 else 6)
    moved = int((counts > 0).sum()) * n * k * (1 / 2 + 2 / 128) + rows * (k + 2 * n)
    return {
        "n": n, "k": k, "rows": rows, "spread": distribution, "us": micros, "error": error,
        "gbps": moved / micros / 1e3, "tflops": 2 * rows * n * k / micros / 1e6,
    }  # fmt: skip


def torch_case(n: int, k: int, rows: int, distribution: str) -> dict[str, Any]:
    """Torch's own grouped products of the same rows: bf16, and FP8 with and without fast accumulation."""
    ends = spread(rows, distribution).cumsum(0).to(torch.int32).cuda()
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16)
    result: dict[str, Any] = {"n": n, "k": k, "rows": rows, "spread": distribution}
    calls = 10 if rows < 4096 else 4
    result["bf16_us"] = graph_time(lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends), calls, 5)
    x8, w8 = x.to(FP8), weight.to(FP8).transpose(1, 2)
    scale_x, scale_w = torch.ones(rows, device="cuda"), torch.ones(EXPERTS, n, device="cuda")
    for fast in (True, False):
        name = "fp8_fast_us" if fast else "fp8_us"
        result[name] = graph_time(
            lambda fast=fast: torch._scaled_grouped_mm(
                x8, w8, scale_x, scale_w, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
            ),
            calls,
            5,
        )
    return result


def host_cost() -> dict[str, float]:
    """Microseconds that the host spends on one call, launches included."""
    weight = random_weight(2, 256, 256)
    x = torch.randn(2, 256, device="cuda").to(FP8)
    args = x, *weight, torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda"), torch.ones(1, device="cuda")
    result = {}
    for name, call in {
        "w4a8_grouped_mm": lambda: w4a8_grouped_mm(*args),
        "torch.empty_like": lambda: torch.empty_like(x),
    }.items():
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            best = min(best, (time.perf_counter() - start) / 100 * 1e6)
        result[name] = best
    return result


def moe_case(tokens: int, mode: str, weights: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """A layer of DeepSeek-V3's shape: 256 experts of which 32 are here, 8 per token."""
    x = torch.randn(tokens, 7168, device="cuda", dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(256)[:8] for _ in range(tokens)]).to(torch.int32)
    ids[ids >= EXPERTS] = -1
    if tokens == 1:
        ids[0, :2] = torch.tensor([3, 17])  # at least one expert is here
    ids = ids.cuda()
    topk_weights = torch.rand(tokens, 8, device="cuda")
    static = torch.full((1,), 0.02, device="cuda")
    args = x, *weights, topk_weights, ids, mode, static, static
    micros = graph_time(lambda: w4a8_fused_experts(*args, total_experts=256), 10)
    here = ids[ids >= 0]
    return {"tokens": tokens, "mode": mode, "pairs": here.numel(), "experts": here.unique().numel(), "us": micros}


def machine() -> dict[str, str]:
    """What the figures belong to."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "commit": commit, "command": " ".join(sys.argv),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the figures here, as JSON")
    parser.add_argument("--commit", help="commit to record where there is no repository")
    parser.add_argument("--parts", default="grouped,host,moe,torch", help="comma-separated (default: all)")
    options = parser.parse_args()
    parts = options.parts.split(",")
    torch.manual_seed(time.time_ns())
    report: dict[str, Any] = {"machine": machine(), "ceilings": ceilings()}
    if options.commit:
        report["machine"]["commit"] = options.commit
    print(report["machine"], report["ceilings"], flush=True)
    if "grouped" in parts:
        report["grouped"] = []
        print("    N     K   rows spread      us   GB/s (of read)  TFLOP/s (of FP8)   error")
        for n, k in SHAPES:
            weight = random_weight(EXPERTS, n, k)
            for rows in ROWS:
                for distribution in SPREADS:
                    case = grouped_case(n, k, rows, distribution, weight)
                    report["grouped"].append(case)
                    print(
                        f"{n:5} {k:5} {rows:6} {distribution:6} {case['us']:7.1f} "
                        f"{case['gbps']:6.0f} ({case['gbps'] / report['ceilings']['read_gbps']:.2f}) "
                        f"{case['tflops']:8.0f} ({case['tflops'] / report['ceilings']['fp8_tflops']:.2f}) "
                        f"{case['error']:12.1e}",
                        flush=True,
                    )
    if "host" in parts:
        report["host"] = host_cost()
        print(report["host"], flush=True)
    if "moe" in parts:
        weights = *random_weight(EXPERTS, 4096, 7168), *random_weight(EXPERTS, 7168, 2048)
        report["moe"] = [
            moe_case(t, mode, weights) for t in (1, 32, 256, 4096) for mode in ("static", "tensor", "token")
        ]
        print(*report["moe"], sep="\n", flush=True)
    if "torch" in parts:
        report["torch"] = [torch_case(n, k, r, d) for n, k in SHAPES for r in ROWS for d in SPREADS if r >= 256]
        print(*report["torch"], sep="\n", flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
