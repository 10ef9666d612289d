"""Perplexity of a dense model as the kernels run it, beside an exact simulation of the same scheme and the source.

    python benchmarks/bench_perplexity.py MODEL TEXT --out benchmarks/results/model-perplexity

The simulation takes the packed codes and scales, rounds activations as the scheme does, and sums in float64 (so that
int8 sums are exact, and are scaled in fp32 as `reference.py` says); everything else of the model is the same. The
source runs in bf16 through transformers. How far such a number can be trusted at all is shown by *noise*: the kernels
again, with up to one unit in the last place of bf16 added to one in 10,000 outputs of the matrices, for several seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_linear import machine
from bench_model import SCHEMES, command
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import tilewright
from tilewright.kernels.modules import PackedLinear, PackedWeight
from tilewright.kernels.modules.mlp import PackedMlp
from tilewright.kernels.ops.reference import quantize_rows
from tilewright.kernels.ops.reference_experts import gated
from tilewright.packer.verify.text import evenly_spaced_windows, read_tokens

INT8_ACTIVATIONS = {"int8", "int4-g32", "int4-g64", "int4-g128"}


class Simulated(nn.Module):
    """The values that a packed matrix stands for, times activations rounded as its operator rounds them."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        spec = packed.spec
        qtensor = spec.layout.unpack(dict(packed.named_buffers()), spec.format, spec.shape, spec.parts)
        self.scale = qtensor.scales.reshape(-1) if spec.format.id == "int8" and qtensor.scales is not None else None
        self.values = (qtensor.dequantize() if self.scale is None else qtensor.codes).double()
        self.bias = 0.0 if packed.bias is None else packed.bias
        self.int8 = spec.format.id in INT8_ACTIVATIONS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.int8:
            return (F.linear(x.to(torch.bfloat16).double(), self.values) + self.bias).to(x.dtype)
        codes, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        y = F.linear(codes.double(), self.values)
        y = y * row_scale.double() if self.scale is None else y.float() * row_scale * self.scale
        return (y + self.bias).to(x.dtype).view(*x.shape[:-1], -1)


class SimulatedMlp(nn.Module):
    """A gated MLP of simulated matrices, rounded where its operator rounds: the product of gate and up, to bf16."""

    def __init__(self, packed: PackedMlp) -> None:
        super().__init__()
        self.gate_up = Simulated(packed.gate_up_proj)
        self.down = Simulated(packed.down_proj)
        self.activation = packed.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x.float()).chunk(2, -1)
        return self.down(gated(gate, up, self.activation).bfloat16().float()).to(x.dtype)


class Noisy(nn.Module):
    """A packed module, one in 10,000 of whose outputs is off by up to one in the last place of bf16."""

    def __init__(self, packed: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.packed = packed
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.packed(x)
        return torch.where(torch.rand(y.shape, generator=self.generator) < 1e-4, y * (1 + 2**-8), y)


def perplexity(model: nn.Module, windows: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood of every token of a window but its first."""
    total = 0.0
    for batch in windows.split(4):
        logits = model(batch).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / windows[:, 1:].numel())


def simulated(packed: nn.Module) -> nn.Module:
    """What stands for a packed module in the simulation."""
    return SimulatedMlp(packed) if isinstance(packed, PackedMlp) else Simulated(packed)


def replaced(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The model with something in place of each packed Linear and MLP."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear | PackedMlp):
            model.set_submodule(name, make(module))
    return model


def measure(source: Path, scheme: str, windows: torch.Tensor, seeds: int) -> tuple[float, float, list[float]]:
    """Perplexity of a packed model, of its simulation, and of the kernels with noise."""
    with tempfile.TemporaryDirectory() as folder:
        quantized, packed = Path(folder) / "quantized", Path(folder) / "packed"
        command("quantize-model", source, quantized, "--scheme", scheme, "--solver", "rtn", *SCHEMES[scheme])
        command("pack-for-cpu", quantized, packed)
        runs = perplexity(tilewright.load_model(packed), windows)
        noisy = []
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            model = replaced(tilewright.load_model(packed), partial(Noisy, generator=generator))
            noisy.append(perplexity(model, windows))
        return runs, perplexity(replaced(tilewright.load_model(packed), simulated), windows), noisy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=128, help="tokens in each")
    parser.add_argument("--seeds", type=int, default=3, help="runs with noise")
    parser.add_argument("--out", type=Path, help="path of the results without suffix")
    options = parser.parse_args()
    logging.disable_progress_bar()
    windows = evenly_spaced_windows(read_tokens(options.model, options.text), options.windows, options.window)
    record: dict[str, dict[str, float | list[float]]] = {}
    heads = ("scheme", "kernels", "simulation", "difference", "noise", "above the source")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    with torch.inference_mode():
        own = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, local_files_only=True).eval()
        source = perplexity(own, windows)
        lines.append(f"| source, bf16 | {source:.4f} | | | | |")
        for scheme in options.schemes:
            began = time.monotonic()
            runs, simulated, noisy = measure(options.model, scheme, windows, options.seeds)
            record[scheme] = {"kernels": runs, "simulation": simulated, "noise": noisy}
            noise = ", ".join(f"{value / runs - 1:+.2%}" for value in noisy)
            name = " g".join([scheme, *SCHEMES[scheme][1:]])
            lines.append(
                f"| {name} | {runs:.4f} | {simulated:.4f} | {runs / simulated - 1:+.3%} | {noise} "
                f"| {runs / source - 1:+.2%} |"
            )
            print(f"{lines[-1]} {time.monotonic() - began:.0f} s", flush=True)
    about = machine()
    text = (
        "# Perplexity as run, and as simulated in float64\n\n"
        f"Machine: {', '.join(f'{key} {value}' for key, value in about.items())}.\n\n"
        f"Command: `python benchmarks/bench_perplexity.py {' '.join(sys.argv[1:])}`.\n\n"
        f"{options.model.name}, {options.text.name}: {options.windows} windows of {options.window} tokens, evenly "
        "spaced; scales by rounding to nearest (`--solver rtn`). Noise: up to one unit in the last place added to one "
        "in 10,000 outputs of the matrices, for each seed; less than its size says nothing about a kernel.\n\n"
    )
    print(text := text + "\n".join(lines) + "\n")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(
            json.dumps({"machine": about, "source": source, "schemes": record}, indent=1) + "\n"
        )
        options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
