"""Whether a module of an engine is a gated MLP, and with which activation: tried out, as names do not tell."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
SIZES = ((16, 8), (16, 8), (8, 16), (4, 8))  # of gate, up and down [N, K], and of the input [M, K]
MAGNITUDES = (0.1, 1.0, 10.0, 100.0)  # of the rows of the input: products on both sides of every bound


def find_activation(
    module: nn.Module, children: Callable[[Tensor, Tensor, Tensor], Mapping[str, nn.Module]]
) -> str | None:
    """The activation with which a module computes `down(act(gate(x)) * up(x))`; None if it computes something else.

    Args:
        module: Is not called: small matrices take the places of its Linears in a copy.
        children: fp64 matrices gate [16, 8], up [16, 8] and down [8, 16] -> the children of the copy that replace its
            own, by name.
    """
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    gate, up, down, x = (torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES)
    x *= torch.tensor(MAGNITUDES, dtype=torch.float64)[:, None]
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children(gate, up, down)}
    try:
        with torch.no_grad():
            y = twin(x)
    except Exception:  # it asks more of its parts than the small ones have, or has parts of other sizes
        return None
    for activation, function in FUNCTIONS.items():
        expected = (function(x @ gate.T) * (x @ up.T)) @ down.T
        if isinstance(y, Tensor) and torch.allclose(y, expected, rtol=1e-9, atol=1e-12):
            return activation
    return None
