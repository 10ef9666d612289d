"""Error feedback (GPTQ): columns are rounded one after the other, and those still to come make up for the error.

The output error of rounding W [N, K] to Q over inputs x is tr((W - Q) H (W - Q)^T) with H = 2 sum(x x^T). When column j
is rounded with error e, moving the columns after it by -e * U[j, j+1:] / U[j, j] makes up for as much of it as they
can, where U is upper triangular and U^T U = H^-1 (Frantar et al. 2022, arXiv:2210.17323).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.tensors import QTensor

from .blocks import block_amax, expand
from .solver import Solver

STRIDE = 128  # columns rounded before the rest of the weight sees their errors, in one product; groups divide it


@dataclass(frozen=True)
class ErrorFeedback:
    """Rounds a weight so that its outputs on given inputs change least.

    Attributes:
        inner: Chooses scales. Without `act_order`, those of a group are chosen when its first column is reached.
        damping: Added to the diagonal of the Hessian, as a share of its mean.
        act_order: Round the columns with the largest inputs first. Column k still belongs to group k // block_k, so the
            format stays plain; in exchange all scales are chosen beforehand, from the untouched weight. Usually much
            better: the most important columns are rounded while all others can still make up for them.
    """

    inner: Solver
    damping: float = 0.01
    act_order: bool = True

    def solve(self, weight: torch.Tensor, hessian: torch.Tensor, fmt: WeightFormat) -> QTensor:
        """Codes and scales of one weight.

        Args:
            weight: fp32 [N, K], finite.
            hessian: fp32 or fp64 [K, K], the sum of x x^T over inputs x, up to any positive factor. A column whose
                diagonal element is 0 saw no input: it is rounded to nearest and takes no part.
            fmt: Weight format with scales; its blocks along K divide 128 or span the row.

        Raises:
            SchemeError: The Hessian is not finite, or not positive semidefinite.
        """
        n, k = weight.shape
        order = torch.arange(k)
        if self.act_order:
            order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        feedback = inverse_root(hessian[order][:, order], self.damping)
        rest = weight.T[order]  # [K, N]: columns of the weight are contiguous here
        codes = torch.empty_like(rest)
        grid: list[torch.Tensor] = []
        spread = None  # [K, N] scales that are chosen beforehand
        if self.act_order or not fmt.block_k:
            grid = [self._scales(weight, fmt)]
            spread = expand(grid[0], fmt, n, k).expand(n, k).T[order]
        unit = STRIDE if spread is not None else fmt.block_k
        for start in range(0, k, STRIDE):
            stop = min(start + STRIDE, k)
            errors = torch.empty(stop - start, n)
            for first in range(start, stop, unit):
                last = min(first + unit, stop)
                if spread is None:
                    grid.append(self._scales(rest[first:last].T, fmt))
                    scales = expand(grid[-1], fmt, n, last - first).T
                else:
                    scales = spread[first:last]
                for j in range(first, last):
                    column, scale = rest[j], scales[j - first]
                    codes[j] = fmt.nearest(column / scale)
                    errors[j - start] = (column - codes[j] * scale) / feedback[j, j]
                    rest[j + 1 : stop].addr_(feedback[j, j + 1 : stop], errors[j - start], alpha=-1)
            rest[stop:].addmm_(feedback[start:stop, stop:].T, errors, alpha=-1)
        natural = torch.empty_like(codes)
        natural[order] = codes
        return QTensor(fmt, fmt.encode(natural.T).contiguous(), torch.cat(grid, 1))

    def _scales(self, weight: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
        weight = weight.contiguous()
        return self.inner.scales(weight, block_amax(weight, fmt), fmt)


def inverse_root(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper triangular U with U^T U = H^-1, H being the damped Hessian; fp32 [K, K], computed in fp64.

    Columns without input get the mean of the diagonal, which leaves them uncoupled.
    """
    damped = hessian.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    live = diagonal > 0
    mean = diagonal[live].mean() if bool(live.any()) else torch.ones((), dtype=torch.float64)
    diagonal[~live] = mean
    diagonal += damping * mean
    # H = V V^T with V upper triangular is the Cholesky factorisation of H with rows and columns reversed; U = V^-1.
    lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if int(info) or not bool(torch.isfinite(lower).all()):
        raise SchemeError(
            f"a calibration Hessian of {len(hessian)} columns is not positive definite with damping {damping}",
            hint="activations overflowed or are not finite; calibrate on other text or raise the damping",
        )
    identity = torch.eye(len(hessian), dtype=torch.float64)
    root: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return root.to(torch.float32)
