"""The table of families: what is tried on each, and docs/models.md.

`python tests/models/table.py docs/models.md` (make models) tries every scheme on every family and writes the page.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from family import Family
from features import without
from registry import FAMILIES
from transformers.utils import logging as hf_logging

import tilewright
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.verify.dequantized import dequantized_model, model_config

# What README says that transformers loads, and what only engines do.
SCHEMES: dict[str, dict[str, Any]] = {
    "block-fp8": {},
    "int4": {"group_size": 32, "checkpoint_format": "compressed-tensors"},
    "int8": {"checkpoint_format": "compressed-tensors"},
}
LOADED_BY_TRANSFORMERS = ("block-fp8", "int4")
STEPS = ("quantize", "pack", "weights", "layers", "model", "load_model", "transformers")
SILENT = tilewright.Silent()
ROUNDED = 0.5  # what activations of 8 bits may cost a model of random weights, whose layers let errors grow
LONG = 300  # letters of a message
SAME = 0.02  # relative distance of logits from the same weights, rounded to bf16 on the way
KL = {False: 0.1, True: 0.6}  # of models with random weights in bf16, which are nothing but sharp; routed ones jump


@dataclass
class Row:
    """What was found of one family.

    Attributes:
        steps: Step -> its result: a figure, "yes", or what refused it.
        failed: Steps that failed, with the message.
    """

    steps: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def try_step(self, directory: Path, step: str, run: Callable[[], str]) -> bool:
        """Carry out a step; a refusal of ours is noted, anything else is an error."""
        try:
            result = run()
        except tilewright.TilewrightError as error:
            message = " ".join(f"{error.message} ".split()).replace(f"{directory}/", "")
            self.failed.setdefault(step, message if len(message) < LONG else f"{message[:LONG]} …")
            return False
        kept = self.steps.get(step)
        self.steps[step] = result if kept in (None, "yes") else f"{kept}, {result}" if result != "yes" else kept
        return True


def load(family: Family, source: Path, **options: Any) -> Any:
    """A checkpoint as transformers loads it, in fp32 unless told otherwise."""
    (name,) = json.loads((source / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(source, **({"dtype": torch.float32} | options)).eval()


def measure(family: Family, schemes: tuple[str, ...], directory: Path) -> Row:
    """Try everything on one family, with each of some schemes."""
    row = Row()
    source = tiny.make(family, directory / "source")
    text = directory / "text"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away, as it has done before. " * 4)
    if row.try_step(directory, "pack", lambda: _done(tilewright.pack(source, directory / "packed", progress=SILENT))):
        options = tilewright.VerifyOptions(
            "model", text=text, windows=2, window=40, thresholds=tilewright.Thresholds(kl=KL[family.routed])
        )
        row.try_step(directory, "weights", partial(_verified, source, directory / "packed"))
        row.try_step(directory, "model", partial(_verified, source, directory / "packed", options))
        row.try_step(directory, "load_model", partial(_logits, family, directory))
    for scheme in schemes:
        _measure_scheme(family, scheme, directory, row)
    return row


def _measure_scheme(family: Family, scheme: str, directory: Path, row: Row) -> None:
    source, quantized, packed = directory / "source", directory / scheme, directory / f"packed-{scheme}"
    options = tilewright.QuantizeOptions(scheme, **SCHEMES[scheme])
    if not row.try_step(
        directory, "quantize", lambda: _done(tilewright.quantize(source, quantized, options, progress=SILENT))
    ):
        return
    row.try_step(directory, "weights", partial(_verified, source, quantized))
    if row.try_step(directory, "pack", lambda: _done(tilewright.pack(quantized, packed, progress=SILENT))):
        row.try_step(directory, "layers", partial(_verified, source, packed, tilewright.VerifyOptions("layers")))
        row.try_step(directory, "load_model", partial(_runs, family, quantized, packed))
    if scheme in LOADED_BY_TRANSFORMERS:
        row.try_step(directory, "transformers", partial(_by_transformers, family, scheme, quantized))


def _done(_: object) -> str:
    return "yes"


def _verified(source: Path, candidate: Path, options: tilewright.VerifyOptions | None = None) -> str:
    found = tilewright.verify(source, candidate, options, progress=SILENT)
    if not found.passed:
        raise tilewright.VerifyError("; ".join(found.failures()[:3]))
    return f"KL {max(found.model.overall.kl, 0):.1g}" if found.model else "yes"


def _logits(family: Family, directory: Path) -> str:
    """The error of a 16-bit pack beside that of transformers in bf16, and whether it would show a missing feature."""
    inputs, source = tiny.text_inputs(family), directory / "source"
    ours = tilewright.load_model(directory / "packed")
    reference, theirs = load(family, source), load(family, source, dtype=torch.bfloat16)
    errors = []
    for name, run in tiny.RUNS.items():
        wanted = run(reference, inputs)
        mine, other = (tiny.distance(run(model, inputs), wanted, family.routed) for model in (ours, theirs))
        if not mine <= 2 * other:
            raise tilewright.VerifyError(f"{name}: logits are off by {mine:.3g}, transformers in bf16 by {other:.3g}")
        errors.append((mine, other))
    wanted, allowed = tiny.whole(reference, inputs), 2 * errors[0][1]
    for feature in family.features:
        changed = tiny.whole(without(feature, partial(load, family), source), inputs)
        moved = tiny.distance(changed, wanted, family.routed)
        if not moved >= 10 * allowed:
            raise tilewright.VerifyError(f"without {feature} logits move by {moved:.3g}, allowed is {allowed:.3g}")
    mine, other = max(errors)
    return f"{100 * mine:.2g}% ({100 * other:.2g}%)"


def _dequantized(family: Family, quantized: Path) -> Any:
    model, fill, _ = dequantized_model(model_config(quantized), read_contents(open_checkpoint(quantized)))
    fill(model, "")
    return model.eval()


def _runs(family: Family, quantized: Path, packed: Path) -> str:
    """Whether a quantized pack gives about what its weights give in fp32; its activations are rounded to 8 bits."""
    inputs = tiny.text_inputs(family)
    wanted = tiny.whole(_dequantized(family, quantized), inputs)
    found = tiny.distance(tiny.whole(tilewright.load_model(packed), inputs), wanted, family.routed)
    if not found <= ROUNDED:
        raise tilewright.VerifyError(f"{packed.name}: logits are {found:.2g} off those of its weights in fp32")
    return "yes"


def _by_transformers(family: Family, scheme: str, quantized: Path) -> str:
    """Whether transformers makes of an output what its weights give in fp32."""
    inputs = tiny.text_inputs(family)
    wanted = tiny.whole(_dequantized(family, quantized), inputs)
    try:
        theirs = tiny.whole(load(family, quantized), inputs)
    except Exception as error:  # what transformers cannot load is a finding
        raise tilewright.VerifyError(
            f"{scheme}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        ) from error
    found = tiny.distance(theirs, wanted, family.routed)
    if not found <= SAME:
        raise tilewright.VerifyError(f"{scheme}: logits are {found:.2g} off those of the weights in fp32")
    return scheme


def unexpected(family: Family, row: Row) -> list[str]:
    """Where a row differs from what the registry says of its family."""
    wrong = [
        f"{step}: {message}"
        for step, message in row.failed.items()
        if not re.search(family.refused.get(step, "$^"), message)
    ]
    return wrong + [f"{step}: is said to be refused, and was not" for step in family.refused if step not in row.failed]


def quieten() -> None:
    """Leave out what transformers says while it loads."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("tilewright").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def _measured(index: int) -> Row:
    quieten()
    row = Row()
    with tempfile.TemporaryDirectory() as directory:
        try:
            return measure(FAMILIES[index], tuple(SCHEMES), Path(directory))
        except Exception as error:  # a fault, which the others do not wait for
            row.failed["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return row


HEADER = """# Models

What was tried on each family, with a tiny model of random weights that transformers {version} makes, by `make models`.
A cell says what was refused, if anything; notes below the table give the reasons.

- quantize, pack, weights, layers: in `block-fp8`, `int4` (groups of 32) and `int8`; every tensor and every packed layer
  verified.
- model: `verify-accuracy --level model` of a 16-bit pack, KL divergence in nats per token. Random weights are sharp: on
  text real models diverge less.
- `load_model`: relative error of the logits of a 16-bit pack, in parentheses that of transformers in bf16; the largest
  of whole, padded and decoded inputs longer than every window, chunk and selection of keys. It may be twice that of
  transformers, and each feature of the family that is switched off moves the logits at least ten times as far. Where a
  router chooses experts the median token counts, as rounding sends a few another way. `block-fp8`, `int4` and `int8`
  packs run as well.
- transformers: outputs that it loads, with the logits that their weights give in fp32.

Of {count} families {works} work throughout, and {ours} in all but what transformers makes of some outputs.

| family | model_type | kind | quantize | pack | weights | layers | model | `load_model` | transformers |
|---|---|---|---|---|---|---|---|---|---|
"""


def page(rows: list[Row]) -> str:
    """docs/models.md."""
    works = sum(not row.failed for row in rows)
    ours = sum(not row.failed.keys() - {STEPS[-1]} for row in rows)
    text = HEADER.format(version=transformers.__version__, works=works, ours=ours, count=len(rows))
    notes: list[str] = []
    for family, row in zip(FAMILIES, rows, strict=True):
        cells = []
        for step in STEPS:
            cell = row.steps.get(step, "")
            if step in row.failed:
                notes.append(f"{len(notes) + 1}. {family.name}, {step}: {row.failed[step]}")
                cell = f"{cell} refused [{len(notes)}]".strip()
            cells.append(cell or "-")
        text += f"| {family.name} | `{family.model_type}` | {family.group} | {' | '.join(cells)} |\n"
    return text + ("\n" + "\n".join(note.replace("|", "\\|") for note in notes) + "\n" if notes else "")


if __name__ == "__main__":
    with ProcessPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        found = list(pool.map(_measured, range(len(FAMILIES))))
    for family, row in zip(FAMILIES, found, strict=True):
        for line in unexpected(family, row):
            print(f"{family.model_type}: {line}", file=sys.stderr)
    Path(sys.argv[1]).write_text(page(found))
