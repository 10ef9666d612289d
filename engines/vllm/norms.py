"""Norms by the root mean square as one operator: vLLM's back end for CPUs writes them in six, a tenth of a decode step.

They are registered as implementations of vLLM's own operators, which packed models prefer (`arguments.py`).
"""

from __future__ import annotations

from torch import Tensor
from vllm import ir

from tilewright.kernels.ops.norms import rms_norm
from tilewright.kernels.packed.module_spec import QUANT_METHOD

OPERATORS = ("rms_norm", "fused_add_rms_norm")


def _runs(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return x.device.type == "cpu" and weight is not None and variance_size is None and weight.dtype == x.dtype


def _runs_with_add(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _runs(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype


def _norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    assert weight is not None
    return rms_norm(x, weight, epsilon)


def _norm_with_add(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    # As in transformers, the sum is rounded to the dtype of the model before it is normalized; vLLM rounds it after.
    assert weight is not None
    total = x + x_residual
    return rms_norm(total, weight, epsilon), total


for _name, _function, _condition in zip(OPERATORS, (_norm, _norm_with_add), (_runs, _runs_with_add), strict=True):
    getattr(ir.ops, _name).register_impl(QUANT_METHOD, supports_args=_condition)(_function)
