"""Every solver, one visible line each."""

from __future__ import annotations

from tilewright.kernels.registry import Registry

from .base import Solver
from .mse import LeastSquares
from .rtn import RoundToNearest

SOLVERS: Registry[Solver] = Registry(
    "solver",
    (
        RoundToNearest(),
        LeastSquares(),
    ),
)
