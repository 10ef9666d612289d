"""The distance between a weight and its source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.tensors import QTensor

from .bounds import allowed_error, allowed_rounding, block_norms, row_runs
from .measures import NATIVE, measure
from .outliers import outlier_blocks

# Where codes were chosen by error feedback, columns make up for each other's errors, so each is off by more than its
# rounding: up to 1.8 times as much over a matrix and 15 times in a block were seen (docs/accuracy.md). Damage to all of
# a matrix, such as doubled scales or shifted codes, is off by 5 times as much and more.
FEEDBACK_TENSOR = 3.0
FEEDBACK_BLOCK = 24.0


@dataclass(frozen=True)
class WeightError:
    """How far one matrix lies from its source.

    Attributes:
        relative: Frobenius norm of the difference over that of the source; 0 for equal, infinite if only the source
            is zero, NaN if the candidate is not finite.
        largest: Largest absolute difference of an element.
        bound: Relative Frobenius error that the format allows.
        ratio: The error of the worst block of scales over what is allowed there; sound up to 1.
        block: Row and column of that block in the grid of scales.
        outliers: Row and column of blocks whose codes do not belong to their scale (see `outliers`).
    """

    relative: float
    largest: float
    bound: float
    ratio: float
    block: tuple[int, int]
    outliers: tuple[tuple[int, int], ...] = ()

    @property
    def sound(self) -> bool:
        """Whether every block is as good as the format allows."""
        return self.ratio <= 1 and not self.outliers

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio, 20 log10(1 / relative), in decibels."""
        return math.inf if self.relative == 0 else -20 * math.log10(self.relative)


EQUAL = WeightError(0.0, 0.0, 0.0, 0.0, (0, 0))


def coded_error(reference: torch.Tensor, q: QTensor, *, exact: bool, feedback: bool = False) -> WeightError:
    """Compare a matrix in one of our formats with its source.

    Args:
        reference: Source values [N, K], fp32 or 16 bits.
        q: The candidate.
        exact: Both sides hold the same format, so nothing may be lost.
        feedback: Codes were chosen to make up for each other's errors. They are further from the source than the
            nearest ones, by a factor that depends on how much inputs are alike, so the bound is a wider one, and
            codes need not be the nearest ones of their scale.
    """
    if q.scales is None:
        if reference.dtype == q.codes.dtype and torch.equal(reference, q.codes):
            return EQUAL
        return value_error(reference.to(torch.float32), q.dequantize(), q.format, exact=exact)
    if reference.numel() == 0:
        return EQUAL
    if reference.dtype not in NATIVE:
        reference = reference.to(torch.float32)
    found = measure(reference, q)
    allowed = allowed_error(found.norm, found.worst, found.nearest, found.count)
    error = _error(found.error.sqrt(), torch.zeros_like(allowed) if exact else allowed, found.norm, found.largest)
    if error.relative == 0:
        return error
    if feedback and not exact:
        whole = error.relative / error.bound if error.bound else math.inf
        ratio = max(whole / FEEDBACK_TENSOR, error.ratio / FEEDBACK_BLOCK)
        return replace(error, bound=FEEDBACK_TENSOR * error.bound, ratio=math.inf if math.isnan(ratio) else ratio)
    return replace(error, outliers=tuple((row, column) for row, column in outlier_blocks(found).nonzero().tolist()))


def value_error(reference: torch.Tensor, candidate: torch.Tensor, fmt: WeightFormat, *, exact: bool) -> WeightError:
    """Compare the values of two matrices that have no scales.

    Args:
        reference: Source values, fp32 [N, K].
        candidate: Those of the candidate, fp32 [N, K].
        fmt: Format without scales: the grid on which errors are judged.
        exact: Nothing may be lost.
    """
    if reference.numel() == 0:
        return EQUAL
    errors, allowed, norms, largest = (
        torch.cat(grids) for grids in zip(*_grids(reference, candidate, fmt), strict=True)
    )
    return _error(errors, torch.zeros_like(allowed) if exact else allowed, norms.square(), largest)


def _grids(
    reference: torch.Tensor, candidate: torch.Tensor, fmt: WeightFormat
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Error, allowed error and norm, and the largest error, for some rows at a time."""
    for rows in row_runs(len(reference), reference.shape[1], fmt):
        difference = candidate[rows] - reference[rows]
        yield (
            block_norms(difference, fmt),
            allowed_rounding(reference[rows], fmt),
            block_norms(reference[rows], fmt),
            difference.abs().amax().reshape(1),
        )


def _error(errors: torch.Tensor, allowed: torch.Tensor, squares: torch.Tensor, largest: torch.Tensor) -> WeightError:
    """The figures of a matrix.

    Args:
        errors: Euclidean error of each block, float64 [rows, columns].
        allowed: What is allowed of it.
        squares: Sum of the squares of the source in each block.
        largest: Largest differences.
    """
    ratios = torch.where(errors == 0, torch.zeros_like(errors), errors / allowed)
    ratios = torch.where(ratios.isnan(), torch.full_like(ratios, math.inf), ratios)
    norm, error = float(squares.sum().sqrt()), _norm(errors)
    row, column = divmod(int(ratios.argmax()), ratios.shape[1])
    return WeightError(
        relative=0.0 if error == 0 else (error / norm if norm else math.inf),
        largest=float(largest.max()),
        bound=_norm(allowed) / norm if norm else 0.0,
        ratio=float(ratios[row, column]),
        block=(row, column),
    )


def _norm(norms: torch.Tensor) -> float:
    return float(norms.square().sum().sqrt())
