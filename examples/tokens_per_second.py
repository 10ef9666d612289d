"""Measure prefill and decode of a packed model, and of transformers in bf16 if its source is given.

python examples/tokens_per_second.py PACKED [--source MODEL] [--prompt N] [--tokens N]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tilewright


def measure(model: nn.Module, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Tokens per second of one pass over `prompt`, and of `tokens` greedy steps after it."""

    def seconds(new: int) -> float:
        start = time.perf_counter()
        model.generate(prompt, min_new_tokens=new, max_new_tokens=new, do_sample=False)
        return time.perf_counter() - start

    seconds(2)  # the first call loads what is loaded once
    first = seconds(1)
    return prompt.shape[1] / first, tokens / max(seconds(tokens + 1) - first, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path, help="directory that pack-for-cpu wrote")
    parser.add_argument("--source", type=Path, help="the 16-bit model, to compare with")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    options = parser.parse_args()

    models = {"packed": tilewright.load_model(options.packed)}
    if options.source:
        models["bf16"] = AutoModelForCausalLM.from_pretrained(options.source, dtype=torch.bfloat16).eval()
    prompt = torch.randint(0, models["packed"].config.vocab_size, (1, options.prompt))
    for name, model in models.items():
        prefill, decode = measure(model, prompt, options.tokens)
        print(f"{name}: prefill {prefill:.1f} tokens/s, decode {decode:.1f} tokens/s")


if __name__ == "__main__":
    main()
