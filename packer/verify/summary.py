"""The outcome of a verification as a page of text."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from ..folding import pattern

KEPT = {"equal": "kept bit for bit", "dropped": "dropped"}
SHOWN = 12  # kinds of failures printed; the JSON has all failures
FIGURE = re.compile(r"\d[\d.e+-]*")


def summary(document: dict[str, Any]) -> str:
    """Text for a terminal from a `Verification.to_json` document."""
    lines = [
        f"{document['verdict'].upper()}  level {document['level']}",
        "",
        f"reference  {document['reference']}",
        f"candidate  {document['candidate']}",
        "",
        *_failures(document),
        *_files(document),
        *_weights(document),
        *_layers(document),
        *_model(document),
    ]
    lines += [f"note: {note}" for note in document["notes"]]
    return "\n".join(lines)


def _failures(document: dict[str, Any]) -> list[str]:
    """What is wrong, before the figures: lines that differ in numbers only are one."""
    if not document["failures"]:
        return []
    kinds: dict[tuple[str, str], list[str]] = {}
    for line in document["failures"]:
        name, _, reason = line.partition(": ")
        kinds.setdefault((pattern(name), FIGURE.sub("#", reason)), []).append(line)
    lines = [f"below the threshold: {len(document['failures'])}"]
    shown = list(kinds.values())[:SHOWN]
    lines += [f"  {found[0]}" + (f" (and {len(found) - 1} like it)" if len(found) > 1 else "") for found in shown]
    if len(kinds) > SHOWN:
        lines.append(f"  … and {len(kinds) - SHOWN} kinds more, see --json or --report")
    return [*lines, ""]


def _row(label: str, text: str) -> str:
    return f"{label:<9}  {text}"


def _percent(value: float | None) -> str:
    return "not finite" if value is None else f"{100 * value:.3g}%"


def _files(document: dict[str, Any]) -> list[str]:
    found = document["files"]
    if not found:
        return []
    damaged = len(found["damaged"])
    return [
        _row("files", f"{found['checked'] - damaged} are what their manifest says" + f", {damaged} not" * bool(damaged))
    ]


def _weights(document: dict[str, Any]) -> list[str]:
    tensors = document["weights"]["tensors"]
    formats = document["weights"]["formats"]
    kept = Counter(tensor["status"] for tensor in tensors if tensor["format"] is None)
    parts = [f"{found['tensors']} {name}" for name, found in formats.items()]
    parts += [f"{kept['equal']} kept bit for bit"] * bool(kept["equal"]) + [f"{kept['dropped']} dropped"] * bool(
        kept["dropped"]
    )
    lines = [_row("weights", f"{len(tensors)} tensors: {', '.join(parts)}")]
    limit = document["thresholds"]["weight_error"]
    for name, found in formats.items():
        worst = f"worst {_percent(found['worst_relative_error'])}"
        if limit is None and found["worst_ratio"] is not None:
            worst += f", at most {_percent(found['worst_ratio'])} of what the format allows"
        lines.append(_row("", f"{name:<9} error {_percent(found['relative_error'])}, {worst}"))
    return lines


def _layers(document: dict[str, Any]) -> list[str]:
    layers = document["layers"]
    if not layers:
        return []
    limit = document["thresholds"]["layer_error"]
    worst = layers[0]
    return [
        _row("layers", f"{len(layers)} packed modules run by the bundled kernels"),
        _row("", f"worst error {_percent(worst['relative'])} (allowed {_percent(limit)}) in {worst['name']}"),
    ]


def _worst(model: dict[str, Any]) -> list[str]:
    """The Linears that add most, and what would mend them."""
    if not model["worst"]:
        return []
    lines = ["adds most, alone in the model of the source (of it by its weight):"]
    lines += [f"  {loss['name']} {loss['kl']:.3g} ({loss['weight_kl']:.3g})" for loss in model["worst"]]
    return lines + [model["outliers"]] * bool(model["outliers"])


def _model(document: dict[str, Any]) -> list[str]:
    model = document["model"]
    if not model:
        return []
    overall, decode = model["overall"], model["decode"]
    lines = [
        _row("model", f"{model['windows']} windows of {model['window']} tokens"),
        _row("", f"perplexity {overall['reference_perplexity']:.4f} -> {overall['candidate_perplexity']:.4f}"),
        _row("", f"KL divergence {overall['kl']:.3g} nats (allowed {document['thresholds']['kl']:g})"),
        _row("", f"top-1 agreement {100 * overall['top1']:.2f}%"),
    ]
    if model["weights_only"]:
        kl = model["weights_only"]["kl"]
        lines.append(_row("", f"of it {kl:.3g} by the weights, {overall['kl'] - kl:.3g} by activations and kernels"))
        lines.append(_row("", model["advice"]))
        lines += [_row("", line) for line in _worst(model)]
    if decode:
        steps = f"{model['decode_steps']} decode steps: KL {decode['kl']:.3g}, top-1 {100 * decode['top1']:.2f}%"
        lines.append(_row("", steps))
    if not model["drift"]:
        return lines
    drift = ", ".join(_percent(layer["relative"]) for layer in model["drift"][-8:])
    lines.append(_row("", f"hidden states off by {drift} after the last layers"))
    return lines
