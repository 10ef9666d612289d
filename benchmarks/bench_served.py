"""What packed models lose as they are served, and by what: weights alone, activations scaled by token and by group.

    python -m benchmarks.bench_served SOURCE TEXT PACKED... [--windows 10] [--plot FILE.png]

KL is KL(source || candidate) in nats, the mean over all tokens of evenly spaced windows, the source in fp32; bits per
weight are those of the quantized Linears with their scales. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

import torch

import tilewright
from tilewright.packer.checkpoint.files import Checkpoint, open_checkpoint
from tilewright.packer.checkpoint.packed import packed_modules
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.progress import Silent
from tilewright.packer.verify.dequantized import model_config, stream_dequantized
from tilewright.packer.verify.model import compare_models
from tilewright.packer.verify.results import ModelResult
from tilewright.packer.verify.stream import StreamedModel
from tilewright.packer.verify.text import read_tokens

LENGTH = 128  # tokens of a window
DECODE_STEPS = 4  # of them fed one at a time


def windows_of(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Windows in the middle of `count` equal parts of a text: int64 [count, LENGTH]."""
    starts = [int((len(tokens) - LENGTH) * (number + 0.5) / count) for number in range(count)]
    return torch.stack([tokens[start : start + LENGTH] for start in starts])


def bits_per_weight(packed: Path) -> float:
    """Of the quantized weights, their scales included."""
    specs = [spec for spec in packed_modules(open_checkpoint(packed)).values() if spec.format.has_scales]
    stored = sum(tensor.nbytes for spec in specs for tensor in spec.tensors().values())
    return 8 * stored / sum(math.prod(spec.shape) for spec in specs)


def served(source: Checkpoint, packed: Path, windows: torch.Tensor) -> dict[str, ModelResult]:
    """The packed model by each kind of scales, "token" with its weights alone."""
    results = {}
    for scales in ("token", "group"):
        model = tilewright.load_model(packed, activation_scales=scales)
        candidate = StreamedModel(model, lambda module, path: None, partial(_forget, model))
        reference = stream_dequantized(model_config(source.root), read_contents(source))
        alone = None
        if scales == "token":
            alone = stream_dequantized(model_config(source.root), read_contents(open_checkpoint(packed)))
        results[scales] = compare_models(reference, candidate, windows, DECODE_STEPS, Silent(), alone)
    return results


def _forget(model: torch.nn.Module, _: torch.nn.Module, path: str) -> None:
    model.packed.forget(f"{path}.")  # type: ignore[operator,union-attr]


def plot(points: dict[str, tuple[float, float]], file: Path) -> None:
    """KL over bits per weight, one point for each candidate."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, (bits, kl) in points.items():
        side = 1 if name.endswith("group") else -1  # labels of the two kinds of scales on two sides
        axes.plot(bits, kl, "o" if side > 0 else "s", color="C0" if side > 0 else "C1")
        where = {"xytext": (7 * side, -3), "ha": "left" if side > 0 else "right"}
        axes.annotate(name, (bits, kl), textcoords="offset points", fontsize=7, **where)
    axes.margins(x=0.45)
    axes.set(xlabel="bits per weight", ylabel="KL divergence from the source, nats", yscale="log")
    axes.grid(which="both", alpha=0.3)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("packed", type=Path, nargs="+")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    source = open_checkpoint(args.source)
    windows = windows_of(read_tokens(args.source, args.text), args.windows)
    points: dict[str, tuple[float, float]] = {}
    print("| | bits per weight | KL, weights alone | KL by token | by group | perplexity by token | by group |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for packed in args.packed:
        found, bits = served(source, packed, windows), bits_per_weight(packed)
        token, group = (found[scales].overall for scales in ("token", "group"))
        alone = found["token"].weights_only
        assert alone
        row = f"{alone.kl:.4f} | {token.kl:.4f} | {group.kl:.4f} | {token.candidate_perplexity:.2f}"
        print(f"| {packed.name} | {bits:.2f} | {row} | {group.candidate_perplexity:.2f} |", flush=True)
        points |= {f"{packed.name}, token": (bits, token.kl), f"{packed.name}, group": (bits, group.kl)}
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    main()
