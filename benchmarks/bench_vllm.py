"""Packed directories served by vLLM beside vLLM's own kinds of the same model: load, memory, decode, prefill.

    .venv-vllm/bin/python benchmarks/bench_vllm.py --out benchmarks/results/vllm-NAME [--kinds moe dense] [--rounds 5]

Random checkpoints of a Qwen3 mixture of experts (1.5 GB) and a dense Qwen3 (1 GB) are written to a temporary directory,
quantized in the form that vLLM reads (compressed-tensors) and in our own, and packed. Each variant is a vLLM in a
process of its own; all are alive at once and take turns, so a round is one measurement of each on the same machine in
the same minute. Numbers are medians of the rounds. vLLM's own variants that it refuses are listed with its reason.

Memory is read from /proc: what a process has of its own (`Private_Dirty` and `Anonymous`), and what it shares with
others through the file (`Shared_Clean`, when a second server maps the same directory).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_linear import machine
from safetensors.torch import save_file

import tilewright

EXAMPLES = Path(__file__).parents[1] / "examples" / "models" / "tiny-qwen3-moe"
PROMPT, STEPS = 256, 32
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "intermediate_size": 768,
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "dense": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
    },
}
SCHEMES = ("int8", "block-fp8", "int4")


@dataclass
class Variant:
    """One server, and what was measured of it.

    Attributes:
        name: How it is called in the table.
        model: What it serves.
        process: Its process; None once it has ended.
        load: Seconds from the import of vLLM to a model that answers, and the memory of its process then, in MB.
        seconds: Of each round, by what was asked.
        refusal: Why vLLM does not serve it.
    """

    name: str
    model: Path
    process: subprocess.Popen[str] | None = None
    load: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    refusal: str = ""

    def start(self, threads: int) -> None:
        """Start the server and wait until it has loaded the model."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(self.model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)},
        )
        reply = self._read()
        self.refusal = reply.pop("error", "")
        self.load = reply

    def ask(self, what: str) -> dict[str, Any]:
        """One measurement."""
        assert self.process
        assert self.process.stdin
        print(what, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process
        assert self.process.stdout
        reply: dict[str, Any] = json.loads(self.process.stdout.readline() or '{"error": "the process has ended"}')
        return reply

    def close(self) -> None:
        """End the server."""
        if self.process:
            self.process.communicate()


def write_source(kind: str, directory: Path) -> Path:
    """A checkpoint of random weights."""
    config = CONFIGS[kind]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((EXAMPLES / name).read_bytes())
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, n: int, k: int) -> None:
        values = torch.empty(n, k, dtype=torch.bfloat16)
        tensors[f"{name}.weight"] = values.normal_(0, 0.02, generator=generator)

    def gated(path: str, hidden: int, inner: int) -> None:
        for name in ("gate_proj", "up_proj"):
            matrix(f"{path}.{name}", inner, hidden)
        matrix(f"{path}.down_proj", hidden, inner)

    hidden, head = config["hidden_size"], config["head_dim"]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, heads in (
            ("q", config["num_attention_heads"]),
            *((name, config["num_key_value_heads"]) for name in "kv"),
        ):
            matrix(f"{layer}.self_attn.{name}_proj", heads * head, hidden)
        matrix(f"{layer}.self_attn.o_proj", hidden, config["num_attention_heads"] * head)
        for name, size in (("self_attn.q_norm", head), ("self_attn.k_norm", head)):
            tensors[f"{layer}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        if kind == "dense":
            gated(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        matrix(f"{layer}.mlp.gate", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            gated(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for name in ("model.embed_tokens", "lm_head"):
        matrix(name, config["vocab_size"], hidden)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def variants(kind: str, folder: Path) -> list[Variant]:
    """The source and its quantized forms as vLLM runs them, and the packed ones."""
    source = write_source(kind, folder / kind)
    found = [Variant("vLLM bf16", source)]
    packed = [("bf16", source)]
    for scheme in SCHEMES:
        for form in ("compressed-tensors", "native"):
            output = folder / f"{kind}-{scheme}-{form}"
            options = tilewright.QuantizeOptions(scheme, checkpoint_format=form)
            try:
                tilewright.quantize(source, output, options, progress=tilewright.Silent())
            except tilewright.TilewrightError:  # a scheme has not every form
                continue
            if form == "compressed-tensors" or scheme == "block-fp8":
                found.append(Variant(f"vLLM {scheme}, {form}", output))
            if not any(name == scheme for name, _ in packed):
                packed.append((scheme, output))
    for scheme, output in packed:
        tilewright.pack(output, folder / f"{kind}-{scheme}-packed", progress=tilewright.Silent())
        found.append(Variant(f"packed {scheme}", folder / f"{kind}-{scheme}-packed"))
    return found


def memory() -> dict[str, float]:
    """Memory of this process in MB."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        fields[name.rstrip(":")] = int(value) / 1000
    return {
        "anonymous": fields["Anonymous"],
        "private": fields["Private_Dirty"],
        "shared_clean": fields["Shared_Clean"],
    }


def serve(model: str) -> None:
    """Load a model, then answer `decode1`, `decode8`, `prefill` and `memory` until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    try:
        llm = LLM(model=model, dtype="bfloat16", enforce_eager=True, max_model_len=1024, enable_prefix_caching=False)
    except Exception as error:
        print(json.dumps({"error": " ".join(str(error).split())[:300]}), file=replies, flush=True)
        return
    print(json.dumps({"load": time.perf_counter() - started} | memory()), file=replies, flush=True)
    generator = torch.Generator().manual_seed(1)
    for line in sys.stdin:
        what = line.strip()
        if what == "memory":
            print(json.dumps(memory()), file=replies, flush=True)
            continue
        batch, length, steps = {"decode1": (1, 8, STEPS), "decode8": (8, 8, STEPS), "prefill": (2, PROMPT, 1)}[what]
        prompts = torch.randint(1, 32000, (batch, length), generator=generator).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        seconds = (time.perf_counter() - started) / (batch * (steps if what != "prefill" else length))
        print(json.dumps({"seconds": seconds}), file=replies, flush=True)


def measure(all_variants: list[Variant], threads: int, rounds: int) -> None:
    """Start every variant, then let them take turns; the first round warms up and is not counted."""
    for variant in all_variants:
        variant.start(threads)
        print(variant.name, variant.refusal or variant.load, file=sys.stderr)
    running = [variant for variant in all_variants if not variant.refusal]
    for number in range(rounds + 1):
        for what in ("decode1", "decode8", "prefill"):
            for variant in running:
                seconds = variant.ask(what)["seconds"]
                if number:
                    variant.seconds.setdefault(what, []).append(seconds)
    for variant in running:
        variant.load |= {f"{name}_after": value for name, value in variant.ask("memory").items()}
    second = Variant("a second server", running[-1].model)
    second.start(threads)
    second.close()
    running[-1].load["second_private"] = second.load["private"]
    for variant in all_variants:
        variant.close()


def table(all_variants: list[Variant]) -> list[str]:
    """Ratios to vLLM's bf16: load and memory (less is better), tokens a second (more is better)."""
    base = all_variants[0]
    lines = [
        "| variant | load | anonymous memory | decode, 1 | decode, 8 | prefill |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for variant in all_variants:
        if variant.refusal:
            lines.append(f"| {variant.name} | vLLM refuses: {variant.refusal} |||||")
            continue
        costs = [variant.load[name] / base.load[name] for name in ("load", "anonymous")]
        speeds = [
            statistics.median(base.seconds[what]) / statistics.median(variant.seconds[what])
            for what in ("decode1", "decode8", "prefill")
        ]
        lines.append(f"| {variant.name} | " + " | ".join(f"{value:.2f}" for value in costs + speeds) + " |")
    return lines


def main() -> None:
    """Measure and write OUT.md and OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="path without ending of the two files to write")
    parser.add_argument("--kinds", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines = ["# vLLM", "", f"Machine: {about}, threads of each server {arguments.threads}.", ""]
    lines += [f"Command: `python {shlex.join(sys.argv)}`.", "", __doc__.split("\n\n", 2)[2].strip(), ""]
    record: dict[str, Any] = {"machine": machine(), "threads": arguments.threads}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as folder:
            found = variants(kind, Path(folder))
            measure(found, arguments.threads, arguments.rounds)
        lines += [f"## {kind}", "", *table(found), ""]
        if "second_private" in found[-1].load:
            both = found[-1].load["second_private"], found[-1].load["private"]
            lines += [
                f"Private memory of a second server of the last one: {both[0] / both[1]:.2f} times the first's.",
                "",
            ]
        record[kind] = {v.name: {"load": v.load, "seconds": v.seconds, "refusal": v.refusal} for v in found}
        if arguments.out:
            arguments.out.with_suffix(".md").write_text("\n".join(lines))
            arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
