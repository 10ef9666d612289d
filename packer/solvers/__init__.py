"""Every solver, one visible line each."""

from __future__ import annotations

from tilewright.kernels.registry import Registry

from .mse import LeastSquares
from .rtn import RoundToNearest
from .solver import Solver

SOLVERS: Registry[Solver] = Registry(
    "solver",
    (
        RoundToNearest(),
        LeastSquares(),
    ),
)
