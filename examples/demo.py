"""The main job on the shipped models: quantize, pack, verify, generate, in every scheme (`make demo`).

Each step is one call of the Python interface; docs/python.md tells more. Everything lands in `demo-out/`: checkpoints,
packed directories, and an HTML report per model and scheme.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import tilewright
from tilewright import Silent, Thresholds, VerifyOptions

HERE = Path(__file__).parent
TEXT = HERE / "models" / "heldout.txt"
LARGEST_KL = {"block-fp8": 0.005, "int8": 0.005, "int4": 0.02, "w4afp8": 0.005}
PROMPT = "And the king said unto "
COLUMNS = ("scheme", "size", "bits/weight", "quantize", "pack", "perplexity", "KL", "top-1", "verdict", "verify")
WIDTHS = (10, 8, 11, 8, 6, 10, 8, 7, 7, 6)


class Notes(logging.Handler):
    """Keeps what the jobs have to tell, once each."""

    said: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.said[record.getMessage()] = None


def generate(model: Any, tokenizer: Any) -> str:
    """A line of text, drawn with the same random numbers for every model."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=72, do_sample=True, temperature=0.6
        )
    return str(tokenizer.decode(output[0])).splitlines()[0]


def row(cells: tuple[str, ...]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join(("", first.strip().ljust(WIDTHS[0]), *others))


def size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def convert(
    model: Path, scheme: str, output: Path, windows: int
) -> tuple[tilewright.Verification, tuple[str, ...], Path]:
    """Quantize, pack and verify one model in one scheme: the verification, a row of the table, the packed directory."""
    quantized, packed = output / f"{model.name}-{scheme}", output / f"{model.name}-{scheme}-cpu"
    quantizing = tilewright.quantize(model, quantized, scheme, progress=Silent()).seconds
    packing = tilewright.pack(quantized, packed, progress=Silent()).seconds
    what, began = tilewright.inspect(packed), time.perf_counter()
    thresholds = Thresholds(kl=LARGEST_KL[scheme])
    options = VerifyOptions("model", thresholds=thresholds, text=TEXT, windows=windows)
    found = tilewright.verify(model, packed, options, progress=Silent())
    found.write_report(output / f"{model.name}-{scheme}.html")
    assert found.model
    overall = found.model.overall
    cells = (
        scheme,
        size(what.nbytes),
        f"{what.bits:.2f}",
        f"{quantizing:.1f} s",
        f"{packing:.1f} s",
        f"{overall.candidate_perplexity:.4f}",
        f"{overall.kl:.1e}",
        f"{100 * overall.top1:.2f}%",
        "pass" if found.passed else "fail",
        f"{time.perf_counter() - began:.0f} s",
    )
    return found, cells, packed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("demo-out"), help="directory to write; replaced if it is there"
    )
    parser.add_argument("--windows", type=int, default=256, help="windows of 128 bytes out of the held-out text")
    parser.add_argument("--models", nargs="*", default=["tiny-qwen3-moe", "tiny-deepseek-v3"])
    options = parser.parse_args()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    print(f"Tilewright {tilewright.__version__}: packed models, run by the bundled kernels, against their source")
    print(f"on {options.windows} windows of 128 bytes of unseen text. Everything lands in {options.output}/.")
    disable_progress_bar()
    logging.getLogger("tilewright").addHandler(Notes())
    torch.set_num_threads(1)  # these layers are too small to share
    failed = False
    for name in options.models:
        model = HERE / "models" / name
        source = tilewright.inspect(model)
        print(f"\n{name}: {source.parameters / 1e6:.2f}M parameters, {size(source.nbytes)} in bf16\n")
        print(row(COLUMNS))
        tokenizer = AutoTokenizer.from_pretrained(model)
        lines = [("source", generate(AutoModelForCausalLM.from_pretrained(model), tokenizer))]
        for scheme in LARGEST_KL:
            found, cells, packed = convert(model, scheme, options.output, options.windows)
            failed |= not found.passed
            print(row(cells), flush=True)
            lines.append((scheme, generate(tilewright.load_model(packed), tokenizer)))
        assert found.model
        perplexity = f"{found.model.overall.reference_perplexity:.4f}"
        blank = ("",) * 4
        print(row(("source", size(source.nbytes), f"{source.bits:.2f}", *blank[:2], perplexity, *blank)))
        print("", *(f"  note: {note}" for note in Notes.said), sep="\n", end="\n\n" if Notes.said else "\n")
        Notes.said.clear()
        print(*(f"  {label:<10}  {text}" for label, text in lines), sep="\n")
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
