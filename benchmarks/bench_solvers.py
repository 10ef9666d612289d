"""Output error of weights under each solver, on synthetic weights with heavy tails and inputs with outlier channels.

    python benchmarks/bench_solvers.py --results benchmarks/results/solvers.md

The error is ||X (Q - W)^T|| / ||X W^T|| on inputs that the solver has not seen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tilewright.kernels.formats import FORMATS, WeightFormat
from tilewright.kernels.tensors import QTensor
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.blocks import block_amax, encode
from tilewright.packer.solvers.gptq import ErrorFeedback
from tilewright.packer.solvers.smooth import Reader, channel_exponents

N, K, TOKENS = 512, 1024, 4096
WEIGHTS = {"Gauss": None, "Student t, 4 degrees of freedom": 4.0, "Student t, 3": 3.0}
OUTLIERS = {"even channels": 0, "8 outlier channels, x20": 8}


def weight(freedom: float | None) -> torch.Tensor:
    """A weight [N, K] with independent elements of about unit size."""
    if freedom is None:
        return torch.randn(N, K)
    chi2 = torch.distributions.Chi2(torch.tensor(freedom)).sample((N, K))
    return torch.randn(N, K) / (chi2 / freedom).sqrt()


def inputs(outliers: int) -> torch.Tensor:
    """Inputs [TOKENS, K] with a spectrum that decays as that of hidden states, some channels many times as large."""
    directions, _ = torch.linalg.qr(torch.randn(K, K))
    spectrum = torch.arange(1, K + 1) ** -0.5
    x = (torch.randn(TOKENS, K) * spectrum) @ directions.T * K**0.5 / spectrum.norm()
    x[:, torch.randperm(K)[:outliers]] *= 20
    return x


def solved(w: torch.Tensor, x: torch.Tensor, fmt: WeightFormat) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Name, resulting values and seconds of each solver."""
    for name, solver in SOLVERS.items():
        began = time.perf_counter()
        scales = solver.scales(w, block_amax(w, fmt), fmt)
        yield name, QTensor(fmt, encode(w, scales, fmt), scales).dequantize(), time.perf_counter() - began
    hessian = x.T @ x
    began = time.perf_counter()
    reader = Reader(w, fmt)
    factors = torch.exp2(channel_exponents([reader], hessian, SOLVERS["mse"]).float())
    yield "awq", reader.quantized(factors, SOLVERS["mse"]).dequantize() / factors, time.perf_counter() - began
    for name, order in (("gptq, natural order", False), ("gptq", True)):
        began = time.perf_counter()
        q = ErrorFeedback(SOLVERS["mse"], act_order=order).solve(w, hessian, fmt)
        yield name, q.dequantize(), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["int4-g32", "int4-g64", "int4-g128", "int8", "fp8"])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    lines: list[str] = []
    for kind, freedom in WEIGHTS.items():
        for channels, outliers in OUTLIERS.items():
            torch.manual_seed(0)
            w, x = weight(freedom), inputs(outliers)
            seen, unseen = x.split(TOKENS // 2)
            exact = float((unseen @ w.T).norm())
            for fmt in (FORMATS[name] for name in options.formats):
                row = {
                    name: (float((unseen @ (values - w).T).norm()) / exact, seconds)
                    for name, values, seconds in solved(w, seen, fmt)
                }
                if not lines:
                    lines += [
                        f"| weights | inputs | format | {' | '.join(row)} |",
                        "|---|---|---|" + "---:|" * len(row),
                    ]
                lines.append(f"| {kind} | {channels} | {fmt.id} | {' | '.join(f'{e:.3%}' for e, _ in row.values())} |")
                print(lines[-1], {name: f"{seconds:.2f} s" for name, (_, seconds) in row.items()}, flush=True)
    text = f"Weights [{N}, {K}], {TOKENS // 2} inputs to calibrate on and as many others to measure on.\n\n"
    text += "\n".join(lines) + "\n"
    print(text)
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(text)


if __name__ == "__main__":
    main()
