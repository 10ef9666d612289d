"""Level `weights`: every tensor of the reference against its counterpart in the candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from tilewright.kernels.errors import LayoutError
from tilewright.kernels.formats import BF16
from tilewright.kernels.tensors import QTensor

from ..checkpoint.contents import Contents, LogicalTensor
from .weight_error import EQUAL, WeightError, coded_error, value_error

Status = Literal["ok", "equal", "dropped", "above the bound", "differs", "missing", "unexpected"]
FAILED: tuple[Status, ...] = ("missing", "unexpected", "differs", "above the bound")


@dataclass(frozen=True)
class TensorResult:
    """The verdict on one logical tensor.

    Attributes:
        name: The tensor.
        status: `ok` inside the bound, `equal` bit for bit, `dropped` left out on purpose, otherwise what is wrong.
        shape: Logical shape.
        format: Format id in the candidate, or the name of its encoding; None for a tensor that is kept as it is.
        error: Distance from the reference; None for kept tensors.
        note: What is wrong, or why it is left out.
    """

    name: str
    status: Status
    shape: tuple[int, ...]
    format: str | None = None
    error: WeightError | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether this tensor fails the verification."""
        return self.status in FAILED

    @property
    def badness(self) -> tuple[float, float]:
        """Sort key, larger is worse: how far above what is allowed, then the relative error."""
        if self.error is None:
            return (math.inf if self.failed else 0.0, 0.0)
        relative = self.error.relative
        outliers = len(self.error.outliers)
        return (
            max(self.error.ratio, 1.0 + outliers if outliers else 0.0),
            math.inf if math.isnan(relative) else relative,
        )


Comparison = tuple[TensorResult, QTensor | None]


def compare_weights(
    reference: Contents, candidate: Contents, max_relative: float | None = None
) -> Iterator[Comparison]:
    """Compare every tensor of two directories, one at a time.

    Args:
        reference: Where the weights come from.
        candidate: What is verified.
        max_relative: Largest relative Frobenius error of a tensor; None means the bound of its format.

    Yields:
        The verdict, and the candidate's codes where it has some, for histograms.
    """
    for _, compare in comparisons(reference, candidate, max_relative):
        yield compare()


def comparisons(
    reference: Contents, candidate: Contents, max_relative: float | None = None
) -> Iterator[tuple[int, Callable[[], Comparison]]]:
    """The same as tasks that may run side by side: elements of the tensor, and what compares it."""

    def compare(source: LogicalTensor, found: LogicalTensor) -> Comparison:
        result = compare_weight(source, found, max_relative, feedback=candidate.feedback)
        reference.forget(source)
        candidate.forget(found)
        return result

    def absent(weight: LogicalTensor, status: Status, note: str) -> tuple[int, Callable[[], Comparison]]:
        return 0, lambda: (TensorResult(weight.name, status, weight.shape, note=note), None)

    for name, source in reference.weights.items():
        found = candidate.find(name)
        if found is not None:
            yield math.prod(source.shape), partial(compare, source, found)
        elif name in candidate.dropped:
            yield absent(source, "dropped", candidate.dropped[name])
        elif name not in reference.aliases:
            yield absent(source, "missing", f"not in {candidate.title}")
    for name, weight in candidate.weights.items():
        if reference.find(name) is None:
            yield absent(weight, "unexpected", f"not in {reference.title}")


def compare_weight(
    source: LogicalTensor, found: LogicalTensor, max_relative: float | None = None, *, feedback: bool = False
) -> Comparison:
    """Compare one tensor with its counterpart; both are read here and forgotten.

    Args:
        source: The reference.
        found: The candidate.
        max_relative: Largest relative Frobenius error; None means the bound of the format.
        feedback: The candidate's codes were chosen by error feedback.
    """
    if source.shape != found.shape:
        note = f"shape {list(found.shape)}, the reference has {list(source.shape)}"
        return TensorResult(source.name, "differs", source.shape, note=note), None
    try:
        stored = found.read()
    except LayoutError as wrong:  # packed bytes that contradict each other
        return TensorResult(source.name, "differs", source.shape, note=wrong.message), None
    if found.encoding:
        return _compare_values(source, found, max_relative), None
    if isinstance(stored, torch.Tensor):
        return _compare_kept(source, stored), None
    fmt = stored.format
    same_format = source.format is not None and source.format.id == fmt.id
    exact = same_format and source.rotation == found.rotation and (found.any_scales or not source.any_scales)
    original = source.read()
    if isinstance(original, QTensor) and exact and _equal_codes(original, stored):
        error = EQUAL
    else:
        error = coded_error(_rotated(source, original, found), stored, exact=exact, feedback=feedback)
    above = not error.relative <= max_relative if max_relative is not None else not error.sound
    status: Status = "above the bound" if above else "equal" if error.relative == 0 else "ok"
    note = _explain(error, exact, max_relative) if above else ""
    return TensorResult(source.name, status, source.shape, fmt.id, error, note), stored


def _rotated(source: LogicalTensor, original: QTensor | torch.Tensor, found: LogicalTensor) -> torch.Tensor:
    """Values of the reference, as `original` gives them, under the rotation of the candidate."""
    values = original.dequantize() if isinstance(original, QTensor) else original
    if source.rotation == found.rotation:
        return values
    values = source.rotation.of(values) if source.rotation else values
    return found.rotation.of(values) if found.rotation else values


def _equal_codes(one: QTensor, other: QTensor) -> bool:
    """Whether two matrices of one format are the same bit for bit."""

    def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(_bits(a), _bits(b))

    return equal(one.codes, other.codes) and equal(one.scales, other.scales) and equal(one.zeros, other.zeros)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its width, so that NaN equals itself and 0 is not -0."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.contiguous().view(width)


def _compare_values(source: LogicalTensor, found: LogicalTensor, max_relative: float | None) -> TensorResult:
    """A candidate whose encoding fits none of our formats: it has no bound of its own, only a given limit."""
    error = value_error(source.values(), found.values(), BF16, exact=False)
    limit = 0.0 if max_relative is None else max_relative
    above = not error.relative <= limit
    status: Status = "above the bound" if above else "equal" if error.relative == 0 else "ok"
    note = f"{found.encoding}: relative error {error.relative:.3g}"
    note += "; no bound is known, give --max-weight-error" if max_relative is None else f", allowed {limit:.3g}"
    return TensorResult(source.name, status, source.shape, found.encoding, error, note if above else "")


def _compare_kept(source: LogicalTensor, stored: torch.Tensor) -> TensorResult:
    original = source.read()
    if isinstance(original, QTensor) or source.encoding:
        # a quantized source that was left out of quantization again: its values, rounded once to the stored type
        same = torch.equal(source.values().to(stored.dtype), stored)
        note = "" if same else "not the dequantized values of the reference"
    elif original.dtype != stored.dtype:
        same, note = False, f"dtype {stored.dtype}, the reference has {original.dtype}"
    else:
        same, note = torch.equal(_bits(original), _bits(stored)), ""
        if not same:
            changed = int((_bits(original) != _bits(stored)).sum())
            note = f"{changed} of {stored.numel()} elements differ, copies keep every bit"
    return TensorResult(source.name, "equal" if same else "differs", source.shape, note=note)


def _explain(error: WeightError, exact: bool, max_relative: float | None) -> str:
    if max_relative is not None:
        return f"relative error {error.relative:.3g}, allowed {max_relative:.3g}"
    if exact:
        return f"relative error {error.relative:.3g} between equal formats, repacking loses nothing"
    if error.ratio <= 1:
        row, column = error.outliers[0]
        return f"codes do not belong to their scale in {len(error.outliers)} blocks, the first is [{row}, {column}]"
    row, column = error.block
    return f"{error.ratio:.3g} times the error that the format allows in block [{row}, {column}] of scales"
