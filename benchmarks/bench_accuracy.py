"""Perplexity, KL divergence, top-1 agreement and weight error of a dense model in each scheme under each solver.

    python benchmarks/bench_accuracy.py MODEL TEXT --results benchmarks/results/accuracy.md

All variants run side by side through one streamed pass: a layer is read once, watched on the calibration text, solved
in every way, and each result carries its own hidden states on. The numbers are those of `quantize-model` and
`verify-accuracy --level model`, which take the same steps one after the other.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig

from tilewright.kernels.formats import FORMATS, WeightFormat
from tilewright.kernels.tensors import QTensor
from tilewright.packer.calibrate.fold import Folder
from tilewright.packer.calibrate.method import CalibrationTargets, Method
from tilewright.packer.calibrate.observe import Observed, observe
from tilewright.packer.calibrate.store import Solution
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.families.norms import FOLDS
from tilewright.packer.schemes.scheme import StorageSpec
from tilewright.packer.solvers import SOLVERS
from tilewright.packer.solvers.blocks import block_amax, encode
from tilewright.packer.solvers.gptq import ErrorFeedback
from tilewright.packer.verify.dequantized import stream_dequantized
from tilewright.packer.verify.distributions import Agreement, AgreementSum
from tilewright.packer.verify.stream import StreamedModel
from tilewright.packer.verify.text import evenly_spaced_windows, read_tokens

SCHEMES = {"block-fp8": "fp8", "int8": "int8", "int4 g64": "int4-g64", "int4 g32": "int4-g32", "int4 g128": "int4-g128"}
COLUMNS = ("scheme", "solver", "perplexity", "KL (nats)", "top-1", "weight error", "KL gap of rtn closed")


@dataclass
class Variant:
    """One scheme under one solver, carried through the model.

    Attributes:
        scheme: Key of `SCHEMES`.
        solver: Name of the solver.
        hidden: Hidden states [B, T, H] so far.
        errors: Sums of squared errors of weights, and of squared weights.
    """

    scheme: str
    solver: str
    hidden: torch.Tensor
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def solve(self, weight: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
        """The values that take the place of a weight."""
        return self._noted(weight, solve(self.solver, weight, hessian, FORMATS[SCHEMES[self.scheme]]).dequantize())

    def _noted(self, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.errors[0] += float((values - weight).square().sum(dtype=torch.float64))
        self.errors[1] += float(weight.square().sum(dtype=torch.float64))
        return values

    def fold(self, path: str, modules: Mapping[str, nn.Module], observed: Observed) -> None:
        """Put solved weights and norms into the layer of a model whose graph is that of Llama."""
        fmt = FORMATS[SCHEMES[self.scheme]]
        target = StorageSpec(fmt.id, "")
        copied = {f"{name}.weight": torch.float32 for name in modules}
        wanted = CalibrationTargets(dict.fromkeys(observed.linears, target), frozenset(), copied, FOLDS["llama"])
        for module in modules.values():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()  # the source's own are put back afterwards
        solution = Solution()
        Folder(Method("awq"), wanted, path, modules, observed).fold(solution)
        for name, values in solution.replaced.items():
            modules[name.removesuffix(".weight")].weight.data = values
        for name in observed.linears:
            weight = modules[name].weight
            q = solution.weights.get(name) or solve("mse", weight.data, weight.data, fmt)
            weight.data = self._noted(weight.data, q.dequantize())


def solve(solver: str, weight: torch.Tensor, hessian: torch.Tensor, fmt: WeightFormat) -> QTensor:
    """One weight by one solver."""
    if solver in SOLVERS:
        scales = SOLVERS[solver].scales(weight, block_amax(weight, fmt), fmt)
        return QTensor(fmt, encode(weight, scales, fmt), scales)
    feedback = ErrorFeedback(SOLVERS["mse"], act_order=solver == "gptq")
    return feedback.solve(weight, hessian, fmt)


class Side:
    """A text on its way through the model: windows, and how each layer is called for them."""

    def __init__(self, model: StreamedModel, windows: torch.Tensor) -> None:
        self.windows = windows
        self.hidden, self.calls = model.embed(windows, [windows.shape[1]])


def run(model: StreamedModel, calibration: Side, evaluation: Side, variants: Sequence[Variant]) -> None:
    """Carry everything through all layers."""
    began = time.monotonic()
    for index in range(model.depth):
        path, layer = model.module(index)
        with model.layer(index) as forward:
            with observe(layer, path, with_hessian=True) as observed:
                calibration.hidden = forward(calibration.hidden, calibration.calls[index])
            evaluation.hidden = forward(evaluation.hidden, evaluation.calls[index])
            _variants(layer, path, observed, variants, forward, evaluation, index)
        print(f"layer {index + 1} of {model.depth}, {time.monotonic() - began:.0f} s", flush=True)


def _variants(layer, path, observed: Observed, variants, forward, evaluation, index) -> None:  # type: ignore[no-untyped-def]
    if observed.experts:
        raise SystemExit("this benchmark takes dense models")
    modules = dict(layer.named_modules(prefix=path))
    source = {name: parameter.data for name, parameter in layer.named_parameters(prefix=path)}
    for variant in variants:
        if variant.solver == "awq":
            variant.fold(path, modules, observed)
        else:
            for name, statistics in observed.linears.items():
                weight = modules[name].weight
                weight.data = variant.solve(weight.data, statistics.hessian)
        variant.hidden = forward(variant.hidden, evaluation.calls[index])
        for name, parameter in layer.named_parameters(prefix=path):
            parameter.data = source[name]


def agreements(model: StreamedModel, evaluation: Side, variants: Sequence[Variant]) -> list[Agreement]:
    """Compare what the source and each variant predict, a few windows at a time."""
    sums = [AgreementSum() for _ in variants]
    for start in range(0, len(evaluation.windows), 4):
        windows, ours = (x[start : start + 4] for x in (evaluation.windows, evaluation.hidden))
        targets = torch.cat((windows[:, 1:], torch.full_like(windows[:, :1], -1)), dim=1)
        logits = model.head(windows, ours)
        for total, variant in zip(sums, variants, strict=True):
            total.add(logits, model.head(windows, variant.hidden[start : start + 4]), targets)
    return [total.result() for total in sums]


def table(model: StreamedModel, evaluation: Side, variants: Sequence[Variant]) -> str:
    """Everything measured, as Markdown."""
    results = agreements(model, evaluation, variants)
    found = {(v.scheme, v.solver): result for v, result in zip(variants, results, strict=True)}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    lines.append(f"| source | | {results[0].reference_perplexity:.3f} | 0 | 100% | 0 | |")
    for variant in variants:
        result, rtn = found[variant.scheme, variant.solver], found.get((variant.scheme, "rtn"))
        closed = f"{1 - result.kl / rtn.kl:.0%}" if rtn and variant.solver != "rtn" else ""
        error = math.sqrt(variant.errors[0] / variant.errors[1])
        lines.append(
            f"| {variant.scheme} | {variant.solver} | {result.candidate_perplexity:.3f} | {result.kl:.5f} "
            f"| {result.top1:.1%} | {error:.2%} | {closed} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--share", type=float, default=0.6, help="share of the text that calibrates; the rest compares")
    parser.add_argument("--calibrate-windows", type=int, default=64)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--schemes", nargs="*", default=["block-fp8", "int8", "int4 g64", "int4 g32"], choices=SCHEMES)
    parser.add_argument("--solvers", nargs="*", default=["rtn", "mse", "awq", "gptq"])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    tokens = read_tokens(options.model, options.text)
    cut = int(len(tokens) * options.share)
    contents = read_contents(open_checkpoint(options.model))
    model = stream_dequantized(AutoConfig.from_pretrained(options.model, local_files_only=True), contents)
    with torch.inference_mode():
        calibration = Side(model, evenly_spaced_windows(tokens[:cut], options.calibrate_windows, options.window))
        evaluation = Side(model, evenly_spaced_windows(tokens[cut:], options.windows, options.window))
        pairs = [(scheme, solver) for scheme in options.schemes for solver in options.solvers]
        variants = [Variant(scheme, solver, evaluation.hidden) for scheme, solver in pairs]
        run(model, calibration, evaluation, variants)
        text = (
            f"{options.model.name}, {options.text.name}: {options.calibrate_windows} windows of {options.window} "
            f"tokens out of the first {options.share:.0%} calibrate, {options.windows} out of the rest compare.\n\n"
        ) + table(model, evaluation, variants)
    print(text)
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(text)


if __name__ == "__main__":
    main()
