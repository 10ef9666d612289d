"""One run of `verify-accuracy`: which levels, in which order, into one `Verification`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.contents import Contents
from ..checkpoint.files import Checkpoint, open_checkpoint
from ..checkpoint.reading import read_contents
from ..records.manifest import FileCheck, check_files
from .folds import follow_folds
from .histograms import Histogram
from .layers import check_layers, layer_names
from .results import ModelResult
from .verdict import LEVELS, Level, Thresholds, Verification
from .weights import TensorResult, compare_weights

Side = tuple[Checkpoint, Contents]
CompareModels = Callable[[Sequence[Side], "Request", Callable[[int, int], None]], ModelResult]
Report = Callable[[str, int, int], None]
"""Told the level or `files`, how many of its files, tensors or layers are done, and how many there are."""


@dataclass(frozen=True)
class Request:
    """What is asked of a verification.

    Attributes:
        level: How far to go; each level includes those before it.
        thresholds: What passes.
        text: UTF-8 file that whole models are compared on; needed for level `model`.
        windows: Windows out of it, evenly spaced.
        window: Tokens in each.
        decode_steps: Last tokens of each window that are fed one at a time, with a key-value cache.
        checksums: Whether files are compared with their manifests first, which reads all of them.
    """

    level: Level = "weights"
    thresholds: Thresholds = field(default_factory=Thresholds)
    text: Path | None = None
    windows: int = 256
    window: int = 128
    decode_steps: int = 4
    checksums: bool = True

    def includes(self, level: Level) -> bool:
        """Whether `level` is to be carried out."""
        return LEVELS.index(level) <= LEVELS.index(self.level)


def verify(
    reference: str,
    candidate: str,
    request: Request,
    compare_models: CompareModels | None = None,
    report: Report = lambda *_: None,
) -> Verification:
    """Compare `candidate` with `reference`.

    Args:
        reference: Directory, .safetensors file or hub id.
        candidate: The same.
        request: What to do.
        compare_models: Runs level `model`: `whole_model.compare_directories`, which needs the extra `hf`.
        report: Hears about progress.

    Raises:
        TilewrightError: One of them cannot be read, or not be run. A result below its threshold is no error.
    """
    assert compare_models or not request.includes("model")
    sides = open_checkpoint(reference), open_checkpoint(candidate)
    contents = read_contents(sides[0]), read_contents(sides[1])
    notes = list(sides[0].notes) + list(sides[1].notes)
    files = _files(sides, report) if request.checksums else None
    moved = follow_folds(*contents, sides[0].config.get("model_type", ""))
    tensors, histograms = _weights(moved, contents[1], request.thresholds.weight_error, report)
    layers = None
    if request.includes("layers"):
        total = len(layer_names(sides[1]))
        if total == 0:
            notes.append("the candidate is not packed, so there are no packed layers to run")
        layers = []
        for result in check_layers(sides[1]):
            layers.append(result)
            report("layers", len(layers), total)
        layers.sort(key=lambda layer: (layer.relative == layer.relative, -layer.relative))
    model = None
    if compare_models and request.includes("model"):
        both = list(zip(sides, contents, strict=True))
        model = compare_models(both, request, lambda done, total: report("model", done, total))
    return Verification(
        reference=reference,
        candidate=candidate,
        level=request.level,
        thresholds=request.thresholds,
        tensors=tensors,
        histograms=histograms,
        layers=layers,
        model=model,
        notes=notes,
        files=files,
    )


def _files(sides: Sequence[Checkpoint], report: Report) -> FileCheck | None:
    """Both sides' files against their manifests; None if neither has one."""
    found = [
        check_files(side.root, side.headers, lambda done, total: report("files", done, total))
        for side in {side.root: side for side in sides}.values()
    ]
    checks = [check for check in found if check]
    if not checks:
        return None
    return FileCheck(sum(check.checked for check in checks), tuple(line for check in checks for line in check.damaged))


def _weights(
    reference: Contents, candidate: Contents, limit: float | None, report: Report
) -> tuple[list[TensorResult], dict[str, Histogram]]:
    histograms: dict[str, Histogram] = {}
    results: list[TensorResult] = []
    total = len(reference.weights)
    for result, codes in compare_weights(reference, candidate, limit):
        if codes is not None:
            histograms.setdefault(codes.format.id, Histogram()).add(codes)
        results.append(result)
        report("weights", min(len(results), total), total)
    return sorted(results, key=lambda result: result.badness, reverse=True), dict(sorted(histograms.items()))
