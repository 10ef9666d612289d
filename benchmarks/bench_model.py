"""Whole models: tokens per second of packed ones beside transformers in bf16, and where a decode step spends its time.

    python benchmarks/bench_model.py MODEL --generate --out benchmarks/results/model-NAME

MODEL is a dense 16-bit checkpoint; `--generate` adds a Qwen3-MoE-shaped one of random weights (1.5 GB), written to a
temporary directory that is deleted afterwards. Each is quantized and packed by the command line. Everything is measured
in one process, the variants interleaved: a round is one prompt and some greedy steps for each; numbers are medians.
The time in Linears and experts is taken by hooks around them, in rounds of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_linear import machine
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

import tilewright
from tilewright.cli.main import load
from tilewright.kernels.modules import PackedExperts, PackedLinear
from tilewright.kernels.modules.mlp import PackedMlp

SCHEMES = {"int8": [], "int4": ["--group-size", "64"], "block-fp8": []}
LIMITS = ("TILEWRIGHT_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
POOL = 1 << 25
clock = time.perf_counter
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 12800,  # as large, beside 4 layers, as that of Qwen3-30B-A3B beside its 48
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@dataclass
class Variant:
    """One way to run a model, and what was measured of it.

    Attributes:
        name: How it is called in the table.
        model: A transformers model.
        experts: transformers' implementation of experts; None for packed ones.
        prefill: Seconds of each prompt.
        steps: Seconds of each decode step.
        hooked: For each decode step with hooks: its seconds, and those in Linears and experts.
    """

    name: str
    model: Any
    experts: str | None = None
    prefill: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    hooked: list[tuple[float, float]] = field(default_factory=list)

    @property
    def cache(self) -> str:
        """What its `forward` calls the cache; the name depends on the release of transformers."""
        names = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in names else "past_key_values"


@dataclass(frozen=True)
class Result:
    """Medians of one variant; ratios are to the faster of transformers' own variants, for each column by itself."""

    variant: str
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    step_ms: float
    matrices_ms: float
    matrices_share: float
    matrices_megabytes: float
    times_prefill: float
    times_decode: float
    times_matrices: float


def generate(root: Path) -> Path:
    """A Qwen3-MoE checkpoint of random weights: every tensor is another cut of one pool of normal numbers."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(QWEN3_MOE))
    pool = torch.empty(POOL, dtype=torch.bfloat16).normal_(0, 0.02)
    shapes = _shapes(QWEN3_MOE)
    tensors = {}
    for name, shape in shapes.items():
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        parts, left = [], size
        while left:
            count = min(left, POOL // 2)
            start = int(torch.randint(0, POOL - count, (1,)))
            parts.append(pool[start : start + count])
            left -= count
        tensors[name] = torch.cat(parts).view(shape)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        rows = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in rows.items()}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (heads,) for name in "qk"}
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes[f"{layer}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            path = f"{layer}.mlp.experts.{expert}"
            shapes |= {f"{path}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{path}.down_proj.weight"] = (hidden, inner)
    matrix = (config["vocab_size"], hidden)
    return shapes | {"model.embed_tokens.weight": matrix, "model.norm.weight": (hidden,), "lm_head.weight": matrix}


def command(name: str, *arguments: object) -> None:
    """Run a command of tilewright, quietly."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        load(name).main([str(argument) for argument in arguments], standalone_mode=False)


def variants(source: Path, folder: Path, schemes: list[str]) -> list[Variant]:
    """transformers' own ways to run a model, and the packed ones."""
    own = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, local_files_only=True).eval()
    found = [Variant("transformers bf16", own)]
    if hasattr(own.config, "num_experts"):
        chosen = str(own.config._experts_implementation)
        found = [Variant(f"transformers bf16, {way}", own, way) for way in dict.fromkeys((chosen, "eager"))]
    for scheme in schemes:
        quantized, packed = folder / f"{source.name}-{scheme}", folder / f"{source.name}-{scheme}-cpu"
        command("quantize-model", source, quantized, "--scheme", scheme, "--solver", "rtn", *SCHEMES[scheme])
        command("pack-for-cpu", quantized, packed)
        found.append(Variant(f"packed {scheme}", tilewright.load_model(packed)))
    return found


def is_matrices(module: nn.Module) -> bool:
    """Whether a module is what packing replaces: a Linear, a whole MLP, or the experts of a layer."""
    own = isinstance(module, nn.Linear) or type(module).__name__.endswith("MoeExperts")
    return own or isinstance(module, PackedLinear | PackedExperts | PackedMlp)


def megabytes_per_step(model: Any) -> float:
    """What a decode step reads of Linears and experts: of experts, those of one token."""
    total = 0.0
    for module in filter(is_matrices, model.modules()):
        size = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
        is_linear = isinstance(module, nn.Linear | PackedLinear | PackedMlp)
        total += size if is_linear else size * model.config.num_experts_per_tok / model.config.num_experts
    return total / 1e6


@contextlib.contextmanager
def timed_modules(model: nn.Module) -> Iterator[Callable[[], float]]:
    """Measures the time in Linears and experts; the function gives the seconds since it was last called."""
    spent = began = 0.0

    def enter(*_: object) -> None:
        nonlocal began
        began = clock()

    def leave(*_: object) -> None:
        nonlocal spent
        spent += clock() - began

    def take() -> float:
        nonlocal spent
        taken, spent = spent, 0.0
        return taken

    handles = []
    for module in filter(is_matrices, model.modules()):
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield take
    finally:
        for handle in handles:
            handle.remove()


def run_once(variant: Variant, prompt: torch.Tensor, tokens: int, hooked: bool) -> None:
    """One prompt and `tokens` greedy steps."""
    if variant.experts:
        variant.model.set_experts_implementation(variant.experts)
    state = {variant.cache: DynamicCache(config=variant.model.config)}

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, float]:
        start = clock()
        logits = variant.model(ids, **state, use_cache=True, logits_to_keep=1).logits
        following = logits[:, -1:].argmax(-1)
        return following, clock() - start

    following, seconds = step(prompt)
    if not hooked:
        variant.prefill.append(seconds)
        for _ in range(tokens):
            following, seconds = step(following)
            variant.steps.append(seconds)
        return
    with timed_modules(variant.model) as take:
        for _ in range(tokens):
            following, seconds = step(following)
            variant.hooked.append((seconds, take()))


def measure(all_variants: list[Variant], prompt: int, tokens: int, seconds: float) -> list[Result]:
    """Rounds of all variants until `seconds` are over, at least two."""
    ids = torch.randint(0, all_variants[0].model.config.vocab_size, (1, prompt))
    for variant in all_variants:  # the first pass reads the files and fills the allocator
        run_once(variant, ids, 1, hooked=False)
        variant.prefill.clear()
        variant.steps.clear()
    deadline, rounds = time.monotonic() + seconds, 0
    while rounds < 2 or time.monotonic() < deadline:
        for variant in all_variants:
            run_once(variant, ids, tokens, hooked=False)
            run_once(variant, ids[:, :8], tokens, hooked=True)
        rounds += 1
    print(f"{rounds} rounds", flush=True)
    return results(all_variants, prompt)


def results(all_variants: list[Variant], prompt: int) -> list[Result]:
    medians = {}
    for variant in all_variants:
        whole, inside = (statistics.median(values) for values in zip(*variant.hooked, strict=True))
        median = statistics.median
        size = megabytes_per_step(variant.model)
        medians[variant.name] = median(variant.prefill), median(variant.steps), inside, inside / whole, size
    best = [min(medians[v.name][i] for v in all_variants if "transformers" in v.name) for i in range(3)]
    return [
        Result(
            variant=name,
            prefill_tokens_per_second=prompt / prefill,
            decode_tokens_per_second=1 / step,
            step_ms=step * 1e3,
            matrices_ms=inside * 1e3,
            matrices_share=share,
            matrices_megabytes=size,
            times_prefill=best[0] / prefill,
            times_decode=best[1] / step,
            times_matrices=best[2] / inside,
        )
        for name, (prefill, step, inside, share, size) in medians.items()
    ]


def markdown(about: dict[str, Any], invocation: str, tables: dict[str, list[Result]], prompt: int) -> str:
    """All results, a table for each model."""
    lines = ["# Whole models", "", "Machine: " + ", ".join(f"{key} {value}" for key, value in about.items()) + ".", ""]
    lines += [f"Command: `{invocation}`.", ""]
    lines += [
        f"Batch 1, prompts of {prompt} tokens, greedy steps through `model(...)` with a cache. *Matrices* are all",
        "Linears, the head included, and experts, timed by hooks in rounds of their own; what is left of a step is",
        "transformers' own: attention, norms, routers, caches, Python. Ratios (x) are to the faster of transformers'",
        "own ways, in each column by itself; share is that of the matrices in a step, MB what a step reads of them.",
        "The matrices of a packed MLP include its activation, which transformers computes between them.",
    ]
    if clock is time.process_time:
        lines += ["", "Times are CPU times of one thread, as other work ran on the machine."]
    heads = ("variant", "prefill tokens/s", "x", "decode tokens/s", "x", "step ms", "matrices ms", "x", "share", "MB")
    for model, rows in tables.items():
        lines += ["", f"## {model}", "", "| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        for r in rows:
            cells = (
                *(r.variant, f"{r.prefill_tokens_per_second:.1f}", f"{r.times_prefill:.2f}"),
                *(f"{r.decode_tokens_per_second:.2f}", f"{r.times_decode:.2f}", f"{r.step_ms:.2f}"),
                *(
                    f"{r.matrices_ms:.2f}",
                    f"{r.times_matrices:.2f}",
                    f"{r.matrices_share:.0%}",
                    f"{r.matrices_megabytes:.0f}",
                ),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a dense 16-bit checkpoint")
    parser.add_argument("--generate", action="store_true", help="also a Qwen3-MoE-shaped model of random weights")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="greedy steps after each prompt")
    parser.add_argument("--seconds", type=float, default=30, help="rounds for each model; two at least")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, of one thread: for a busy machine")
    parser.add_argument("--work", type=Path, help="where the temporary directory is made")
    parser.add_argument("--out", type=Path, help="path of the results without suffix")
    options = parser.parse_args()
    if not options.model and not options.generate:
        parser.error("give a MODEL, or --generate, or both")
    return options


def main() -> None:
    global clock  # noqa: PLW0603
    options = parse()
    if options.cpu_time:
        torch.set_num_threads(1)
        clock = time.process_time
    logging.disable_progress_bar()
    tables, about, began = {}, machine(), time.monotonic()
    wishes: list[Path | None] = ([options.model] if options.model else []) + ([None] if options.generate else [])
    for wanted in wishes:
        with tempfile.TemporaryDirectory(dir=options.work) as work, torch.inference_mode():
            source = wanted or generate(Path(work) / "Qwen3-MoE-shaped, 4 layers of 32 experts, random")
            found = variants(source, Path(work), options.schemes)
            print(f"{source.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            tables[source.name] = measure(found, options.prompt, options.tokens, options.seconds)
            del found
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    invocation = " ".join([*limits, "python benchmarks/bench_model.py", *sys.argv[1:]])
    text = markdown(about, invocation, tables, options.prompt)
    print(text, f"{time.monotonic() - began:.0f} s", sep="\n")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": about, "results": {name: [asdict(row) for row in rows] for name, rows in tables.items()}}
        options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
