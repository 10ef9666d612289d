"""The model card of an output: what it was made from, how, what that lost, and what serves it."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .contents import CARD_FILE, Contents
from .serving import serving_lines

PICTURE_FILE = "accuracy.svg"
KEPT_FIELDS = ("license", "license_name", "license_link", "language", "pipeline_tag")  # of the source's card
SCHEMES = {
    "block-fp8": "FP8 (e4m3) with one scale for each block of 128 x 128; activations in FP8, scaled at run time",
    "int8": "INT8 with one scale for each output channel; activations in INT8, scaled token by token",
    "int4": "INT4 with one scale for each group of input channels",
    "mxfp4": "MXFP4 (FP4 e2m1) with one power of two as scale for each group of 32 input channels",
    "w4afp8": "routed experts in INT4 with one scale for each group of 128 input channels, all else in block FP8",
}
FLAGS = {"form": "--format", "text": "--calibrate"}
IMPLIED = {"job", "strict", "group_size", "calibration", "target", "cut"}


@dataclass(frozen=True)
class CardSource:
    """What the card says of the model that was converted.

    Attributes:
        base_model: Its hub id; None if nobody said.
        fields: License, language and the like, as its own card states them.
    """

    base_model: str | None
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """How an output was made, by its manifest and its config.

    Attributes:
        scheme: Scheme id; None for packed 16-bit weights.
        form: Checkpoint format; None for what is packed.
        packed: "cpu" or "gpu" for a packed directory.
    """

    scheme: str | None
    form: str | None
    packed: str | None


def how_made(contents: Contents) -> Made:
    """Read it from the manifest and the config."""
    options = contents.manifest.options
    config = json.loads((contents.root / "config.json").read_text(encoding="utf-8"))
    block = config.get("quantization_config") or {}
    if block.get("quant_method") != "tilewright":
        return Made(options.get("scheme"), options.get("form"), None)
    scheme = block.get("scheme")
    return Made(None if scheme == "none" else scheme, None, block.get("target"))


def fields_of_source(root: Path) -> dict[str, Any]:
    """What of the source's card holds for the output, too; empty if there is no card, or none with metadata."""
    try:
        data = ModelCard((root / CARD_FILE).read_text(encoding="utf-8")).data.to_dict()
    except (OSError, ValueError):
        return {}
    return {name: data[name] for name in KEPT_FIELDS if data.get(name)}


def reproduction(contents: Contents, made: Made, base_model: str | None) -> str:
    """The command that makes the same bytes again, from the options in the manifest."""
    options, source = contents.manifest.options, base_model or "SOURCE"
    if made.packed:
        of = f"  # SOURCE: the {made.scheme} checkpoint that this was packed from" if made.scheme else ""
        return f"pack-for-{made.packed} {'SOURCE' if of else source} OUTPUT{of}"
    words = ["quantize-model", source, "OUTPUT", "--scheme", str(made.scheme)]
    if made.scheme == "int4":
        words += ["--group-size", str(options["group_size"])]
    for name, value in options.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        if name == "scheme" or name in IMPLIED or value in (None, False, []):
            continue
        for item in value if isinstance(value, list) else [value]:
            words += [flag] if item is True else [flag, str(item)]
    return " ".join(shlex.quote(word) for word in words)


def write_card(
    contents: Contents, repo: str, source: CardSource, verification: Mapping[str, Any] | None, picture: bool
) -> str:
    """The text of README.md, metadata first."""
    made, name = how_made(contents), repo.rpartition("/")[2]
    size = sum(file.size for file in contents.files if file.is_shard)
    data = ModelCardData(
        **source.fields,
        base_model=source.base_model,
        base_model_relation="quantized" if source.base_model else None,
        tags=_tags(made),
        library_name=None if made.packed else "transformers",
    )
    base = f"[{source.base_model}](https://huggingface.co/{source.base_model})" if source.base_model else "a model"
    kind = f"packed for {made.packed.upper()} kernels" if made.packed else f"in the format `{made.form}`"
    scheme = SCHEMES.get(made.scheme or "", "16-bit weights")
    parts = [
        f"---\n{data.to_yaml().strip()}\n---\n",
        f"# {name}\n",
        f"{base}, converted by Tilewright {contents.manifest.tool}: {scheme}; {kind}. "
        f"{size / 1e9:.3g} GB of weights.\n",
        *_serving(made, repo),
        *_fates(contents),
        *_accuracy(verification, picture),
        "## Make it again\n",
        f"```console\n{reproduction(contents, made, source.base_model)}\n```\n",
        "The same source, options and version of the tool give the same bytes. `manifest.json` holds all options and "
        "the SHA-256 of every file, `ledger.json` what became of every tensor and why.\n",
    ]
    return "\n".join(parts)


def _tags(made: Made) -> list[str]:
    tags = ["tilewright", *([made.scheme] if made.scheme else []), *([f"packed-{made.packed}"] if made.packed else [])]
    return [*tags, *(["compressed-tensors"] if made.form == "compressed-tensors" else [])]


def _serving(made: Made, repo: str) -> Iterable[str]:
    lines = serving_lines(made.scheme, made.form, bool(made.packed), repo)
    if lines:
        yield "## Serve\n"
    for engine, language, line in lines:
        yield f"{engine}:\n\n```{language}\n{line}\n```\n"


def _fates(contents: Contents) -> Iterable[str]:
    """A table of what became of the source's tensors; those that were kept by the reason."""
    ledger = json.loads((contents.root / "ledger.json").read_text(encoding="utf-8"))
    rows: Counter[tuple[str, str]] = Counter()
    weights: Counter[tuple[str, str]] = Counter()
    for tensor in ledger["tensors"].values():
        kept = tensor["fate"] == "copied"
        key = (f"kept in {tensor['dtype']}", tensor["reason"]) if kept else (tensor["fate"], "")
        rows[key] += 1
        weights[key] += math.prod(tensor["shape"])
    yield "## What was converted\n"
    yield "| tensors | | why | numbers |\n|---:|---|---|---:|"
    for (fate, reason), count in sorted(rows.items(), key=lambda row: -weights[row[0]]):
        yield f"| {count} | {fate} | {reason.replace('|', '/')} | {weights[fate, reason]:,} |"
    yield ""


def _accuracy(verification: Mapping[str, Any] | None, picture: bool) -> Iterable[str]:
    yield "## Accuracy\n"
    if verification is None:
        yield "Not verified.\n"
        return
    verdict = "within" if verification["verdict"] == "pass" else "**not within**"
    level = verification["level"]
    yield f"Compared with its source by `verify-accuracy` (level `{level}`): {verdict} what the formats allow.\n"
    yield "| format | tensors | relative error | worst tensor | worst share of its bound |\n|---|---:|---:|---:|---:|"
    for name, found in verification["weights"]["formats"].items():
        yield (
            f"| {name} | {found['tensors']} | {100 * found['relative_error']:.3f}% "
            f"| {100 * found['worst_relative_error']:.3f}% | {100 * found['worst_ratio']:.0f}% |"
        )
    yield ""
    if picture:
        yield f"![Relative error of the weights by module]({PICTURE_FILE})\n"
    if layers := verification["layers"]:
        worst = max(layers, key=lambda layer: layer["relative"] or 0)
        error = f"worst relative error {worst['relative']:.2g}"
        yield f"Kernels beside the decoded weights: {len(layers)} layers, {error}.\n"
    if model := verification["model"]:
        found = model["overall"]
        text = f"{model['windows']} windows of {model['window']} tokens"
        yield f"Whole model on {text}: KL divergence {found['kl']:.2g} nats a token.\n"
