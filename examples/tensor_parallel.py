"""Generate text with several processes, each holding one share of the weights.

pack-for-cpu MODEL PACKED --tp 2
torchrun --nproc-per-node 2 examples/tensor_parallel.py PACKED
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import distributed
from transformers import AutoTokenizer

import tilewright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path, help="directory that pack-for-cpu --tp wrote")
    parser.add_argument("prompt", nargs="?", default="In the beginning ")
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    share = next(options.packed.glob(f"rank-{rank}-of-*"))
    tokenizer = AutoTokenizer.from_pretrained(share)
    model = tilewright.load_model(options.packed)  # maps this rank's directory only
    prompt = tokenizer(options.prompt, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False)
    if rank == 0:
        print(tokenizer.decode(output[0], skip_special_tokens=True))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
