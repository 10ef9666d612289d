"""The distance between a weight and its source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.tensors import QTensor

from .bounds import allowed_error, block_norms, row_runs
from .strays import stray_blocks

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
        strays: Row and column of blocks whose codes do not belong to their scale (see `strays`).
    """

    relative: float
    largest: float
    bound: float
    ratio: float
    block: tuple[int, int]
    strays: tuple[tuple[int, int], ...] = ()

    @property
    def sound(self) -> bool:
        """Whether every block is as good as the format allows."""
        return self.ratio <= 1 and not self.strays

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio, 20 log10(1 / relative), in decibels."""
        return math.inf if self.relative == 0 else -20 * math.log10(self.relative)


def coded_error(reference: torch.Tensor, q: QTensor, *, exact: bool, feedback: bool = False) -> WeightError:
    """Compare a matrix in one of our formats with its source.

    Args:
        reference: Source values, fp32 [N, K].
        q: The candidate.
        exact: Both sides hold the same format, so nothing may be lost.
        feedback: Codes were chosen to make up for each other's errors. They are further from the source than the
            nearest ones, by a factor that depends on how much inputs are alike, so the bound is a wider one, and
            codes need not be the nearest ones of their scale.
    """
    error = weight_error(reference, q.dequantize(), q.format, exact=exact)
    if q.scales is None or error.relative == 0:
        return error
    if feedback and not exact:
        whole = error.relative / error.bound if error.bound else math.inf
        ratio = max(whole / FEEDBACK_TENSOR, error.ratio / FEEDBACK_BLOCK)
        return replace(error, bound=FEEDBACK_TENSOR * error.bound, ratio=math.inf if math.isnan(ratio) else ratio)
    return replace(error, strays=tuple((row, column) for row, column in stray_blocks(reference, q).nonzero().tolist()))


def weight_error(reference: torch.Tensor, candidate: torch.Tensor, fmt: WeightFormat, *, exact: bool) -> WeightError:
    """Compare the values of two matrices.

    Args:
        reference: Source values, fp32 [N, K].
        candidate: What the candidate's codes stand for, fp32 [N, K].
        fmt: Format of the candidate: the grid on which errors are judged.
        exact: Both sides hold the same format, so nothing may be lost.
    """
    if reference.numel() == 0:
        return WeightError(0.0, 0.0, 0.0, 0.0, (0, 0))
    errors, allowed, norms, largest = (
        torch.cat(grids) for grids in zip(*_grids(reference, candidate, fmt), strict=True)
    )
    if exact:
        allowed = torch.zeros_like(allowed)
    ratios = torch.where(errors == 0, torch.zeros_like(errors), errors / allowed)
    ratios = torch.where(ratios.isnan(), torch.full_like(ratios, math.inf), ratios)
    norm, error = _norm(norms), _norm(errors)
    row, column = divmod(int(ratios.argmax()), ratios.shape[1])
    return WeightError(
        relative=0.0 if error == 0 else (error / norm if norm else math.inf),
        largest=float(largest.max()),
        bound=_norm(allowed) / norm if norm else 0.0,
        ratio=float(ratios[row, column]),
        block=(row, column),
    )


def _grids(
    reference: torch.Tensor, candidate: torch.Tensor, fmt: WeightFormat
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Error, allowed error and norm of each block of scales, and the largest error, for some rows at a time."""
    for rows in row_runs(len(reference), reference.shape[1], fmt):
        difference = candidate[rows] - reference[rows]
        yield (
            block_norms(difference, fmt),
            allowed_error(reference[rows], fmt),
            block_norms(reference[rows], fmt),
            difference.abs().amax().reshape(1),
        )


def _norm(norms: torch.Tensor) -> float:
    return float(norms.square().sum().sqrt())
