"""Generate text from a packed model: python examples/generate.py PACKED [PROMPT] [--tokens N]."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoTokenizer

import tilewright
from tilewright.kernels.modules import report_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packed", type=Path, help="directory that pack-for-cpu wrote")
    parser.add_argument("prompt", nargs="?", default="In the beginning ")
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()

    model = tilewright.load_model(options.packed)
    kernels = {(use.layout, use.kernel) for use in report_kernels(model)}
    print("\n".join(f"{layout}: {kernel}" for layout, kernel in sorted(kernels)))

    tokenizer = AutoTokenizer.from_pretrained(options.packed)
    prompt = tokenizer(options.prompt, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
