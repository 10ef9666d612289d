"""Norms by the root mean square in one operator, in the place of those that transformers writes in eight.

Nothing here is packed. It is ours for a measured cost: beside packed Linears, the eight calls of each norm took three
times as long in a decode step as one takes (docs/runtime.md).
"""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from .. import _native  # noqa: F401  (loads the operators)
from ..ops import fakes
from .packed_modules import refuse_gradient

_RMS_NORM = torch.ops.tilewright.rms_norm.default


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * round(x / sqrt(mean(x^2) + epsilon))`: fp32, rounded to the dtype of `x`, then to that of the result.

    `reference.rms_norm` states every rounding. The bits depend neither on the instruction set nor on the batch.

    Args:
        x: fp32, bf16 or fp16 [..., K].
        weight: fp32, bf16 or fp16 [K].
        epsilon: Added to the mean of squares.

    Returns:
        [..., K] in the dtype that both have, fp32 if they differ; contiguous.
    """
    result: Tensor = _RMS_NORM(x, weight, epsilon)
    return result


def _fake_rms_norm(x: Tensor, weight: Tensor, _epsilon: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


fakes.register("rms_norm", _fake_rms_norm)


class RmsNorm(nn.Module):
    """A norm by the root mean square, run by `rms_norm`.

    Args:
        weight: fp32, bf16 or fp16 [K].
        epsilon: Added to the mean of squares.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last axis: fp32, bf16 or fp16 [.., K] -> the same."""
        # Read where nn.Module keeps it, not as an attribute, as in PackedLinear: decoding calls this for every token.
        y = rms_norm(hidden_states, self._parameters["weight"], self.variance_epsilon)  # type: ignore[arg-type]
        return refuse_gradient(y, hidden_states) if hidden_states.requires_grad else y

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"


def replace_norms(model: nn.Module) -> None:
    """Let `rms_norm` run the norms of a model on a CPU: those whose class computes the same numbers, whatever its name.

    Models differ in details that no name tells: whether the weight counts from 0 or 1, where values are rounded.
    """
    same: dict[type, bool] = {}
    for path, module in list(model.named_modules()):
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon") or module._buffers:
            continue
        if kind not in same:
            same[kind] = _computes_rms_norm(module)
        if same[kind]:
            model.set_submodule(path, RmsNorm(module.weight, module.variance_epsilon))


def _computes_rms_norm(norm: Any) -> bool:
    """Whether a norm gives the bits of `rms_norm`, tried out with integers whose squares sum exactly in any order."""
    if list(inspect.signature(norm.forward).parameters)[1:]:
        return False
    twin, columns = copy.deepcopy(norm), norm.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-20, 21, (3, columns), generator=generator)
    weight = torch.randn(columns, generator=generator)
    for x_dtype, weight_dtype in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        twin.weight = nn.Parameter(weight.to(weight_dtype), requires_grad=False)
        if not torch.equal(twin(x.to(x_dtype)), rms_norm(x.to(x_dtype), twin.weight, twin.variance_epsilon)):
            return False
    return True
