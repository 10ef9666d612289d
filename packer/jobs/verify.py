"""Verify that a conversion is as good as its format allows."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint import quantization_config
from ..checkpoint.contents import Contents
from ..checkpoint.files import Checkpoint, open_checkpoint
from ..checkpoint.packed import packed_modules
from ..checkpoint.reading import read_contents
from ..engine.identity import reading
from ..engine.workers import Workers
from ..families.config import head_size, text_config
from ..limits import cpu_count
from ..malloc_trim import FreedMemory
from ..progress import Progress, progress_on
from ..records.manifest import FileCheck, check_files, manifest_hash
from ..threads import threads_for
from ..verify.folds import follow_folds
from ..verify.histograms import Histogram
from ..verify.judges import second_opinion
from ..verify.layers import check_layers, layer_names
from ..verify.options import VerifyOptions
from ..verify.results import LayerResult, ModelResult
from ..verify.verdict import Verification
from ..verify.weights import Comparison, TensorResult, comparisons
from .extras import needing_transformers

log = logging.getLogger("tilewright")
BYTES_PER_WEIGHT = 6  # while one is compared: codes, and parts of both sides
MEMORY = 192 << 20  # bytes that tensors may need together; one that alone needs more is compared alone


def verify(
    reference: str | Path,
    candidate: str | Path,
    options: VerifyOptions | None = None,
    *,
    load_model: Callable[[Path], Any],
    progress: Progress | None = None,
) -> Verification:
    """See `tilewright.verify`, which hands in `load_model`: what loads a packed directory as a model."""
    options, progress = options or VerifyOptions(), progress or progress_on()
    sides = open_checkpoint(reference), open_checkpoint(candidate)
    with reading(*sides):
        contents = read_contents(sides[0]), read_contents(sides[1])
        notes = [*sides[0].notes, *sides[1].notes]
        wrong_pair = _wrong_pair(*sides)
        for reason in wrong_pair:
            log.warning("%s", reason)
        files = _files(sides, progress) if options.checksums else None
        moved = follow_folds(*contents, sides[0].config.get("model_type", ""), head_size(sides[0].config))
        tensors, histograms = _weights(moved, contents[1], options.thresholds.weight_error, progress)
        for side in sides:
            failures, opinions = second_opinion(side)
            tensors, notes = [*failures, *tensors], [*notes, *opinions]
        layers = _layers(sides[1], progress) if options.includes("layers") else None
        if layers == []:
            notes.append("the candidate is not packed, so there are no packed layers to run")
        model: ModelResult | None = None
        if options.includes("model"):
            whole_model = needing_transformers("verify.whole_model", "--level model")
            both = list(zip(sides, (moved, contents[1]), strict=True))  # moved scales change no bit of what is computed
            model = whole_model.compare_directories(both, options, load_model, progress)
    return Verification(
        reference=str(reference),
        candidate=str(candidate),
        level=options.level,
        thresholds=options.thresholds,
        tensors=tensors,
        histograms=histograms,
        layers=layers,
        model=model,
        notes=notes,
        files=files,
        wrong_pair=wrong_pair,
        options=options,
        manifest=manifest_hash(sides[1].root),
    )


def _wrong_pair(reference: Checkpoint, candidate: Checkpoint) -> tuple[str, ...]:
    """What says that these two do not belong together, before any weight is compared."""
    kinds = [text_config(side.config).get("model_type") for side in (reference, candidate)]
    if all(kinds) and kinds[0] != kinds[1]:
        return (f"model_type differs: the reference is `{kinds[0]}`, the candidate `{kinds[1]}`",)
    quantized = [bool(quantization_config(side.config)) for side in (reference, candidate)]
    if quantized == [True, False]:
        return ("the reference is quantized and the candidate is not; are they swapped?",)
    return ()


def _files(sides: Sequence[Checkpoint], progress: Progress) -> FileCheck | None:
    """Both sides' files against their manifests; None if neither has one."""
    found = [check_files(side.root, side.headers, progress) for side in {side.root: side for side in sides}.values()]
    checks = [check for check in found if check]
    if not checks:
        return None
    return FileCheck(sum(check.checked for check in checks), tuple(line for check in checks for line in check.damaged))


def _weights(
    reference: Contents, candidate: Contents, limit: float | None, progress: Progress
) -> tuple[list[TensorResult], dict[str, Histogram]]:
    """Every tensor, worst first, and counts of codes and scales by format; tensors side by side on all CPUs."""
    histograms: dict[str, Histogram] = {}
    results: dict[int, TensorResult] = {}
    counting = threading.Lock()  # of the two above

    def task(number: int, size: int, compare: Callable[[], Comparison]) -> None:
        result, codes = compare()
        counted = Histogram()
        if codes is not None:
            counted.add(codes)
        with counting:
            results[number] = result
            if codes is not None:
                histograms.setdefault(codes.format.id, Histogram()).merge(counted)
        del codes
        with counting:
            freed.add(BYTES_PER_WEIGHT * size)
        progress.advance(size)

    freed = FreedMemory()
    tasks = list(comparisons(reference, candidate, limit))
    works = [(BYTES_PER_WEIGHT * size, partial(task, i, size, compare)) for i, (size, compare) in enumerate(tasks)]
    progress.start("verifying weights", sum(size for size, _ in tasks), unit="weights")
    try:
        Workers(works, min(cpu_count(), max(len(works), 1)), MEMORY).run()
    finally:
        progress.finish()
    ordered = [results[number] for number in range(len(tasks))]
    return sorted(ordered, key=lambda result: result.badness, reverse=True), dict(sorted(histograms.items()))


def _layers(candidate: Checkpoint, progress: Progress) -> list[LayerResult]:
    """Every packed layer, worst first."""
    layers = []
    largest = max((math.prod(spec.shape) for spec in packed_modules(candidate).values()), default=0)
    progress.start("verifying layers", len(layer_names(candidate)), unit="layers")
    try:
        with threads_for(largest):
            for result in check_layers(candidate):
                layers.append(result)
                progress.advance()
    finally:
        progress.finish()
    return sorted(layers, key=lambda layer: (layer.relative == layer.relative, -layer.relative))
