"""Linears of a transformers model: which modules are ones, whatever their class, and the precision of plain ones."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SMALL_N, SMALL_K = 3, 5


def why_no_linear(module: nn.Module, n: int, k: int) -> str:
    """Why a module does not compute `x W^T + b` with a `weight` of N x K elements; empty if it does.

    It is tried out on a copy with a small matrix, because names do not tell: Falcon's Linears are their own class,
    GPT-2's hold the transposed matrix, and some that inherit from `nn.Linear` compute something else.

    Args:
        module: One with a parameter `weight`, which is not read.
        n: Rows of the matrix, in the orientation of `nn.Linear`.
        k: Columns of the matrix.
    """
    name = type(module).__name__
    if type(module).forward is nn.Linear.forward:
        found = tuple(module._parameters["weight"].shape)  # type: ignore[union-attr]
        return "" if found == (n, k) else f"{name} has a weight {list(found)}, the packed one is {[n, k]}"
    others = [key for key in (*module._parameters, *module._modules) if key not in {"weight", "bias"}]
    if others or len(inspect.signature(module.forward).parameters) != 1:
        return f"{name} computes something else than a Linear"
    small_n, small_k = (SMALL_N, SMALL_N) if n == k else (SMALL_N, SMALL_K)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(small_n, small_k, generator=generator, dtype=torch.float64)
    bias = torch.randn(small_n, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 4, small_k, generator=generator, dtype=torch.float64)
    wanted = functional.linear(x, weight, None if module._parameters.get("bias") is None else bias)
    stored = tuple(module._parameters["weight"].shape)  # type: ignore[union-attr]
    for shape, values in (((n, k), weight), ((k, n), weight.T.contiguous())):
        if stored == shape and _gives(module, {n: small_n, k: small_k}, values, bias, x, wanted):
            return ""
    return f"{name} computes something else than a Linear"


def _gives(
    module: nn.Module,
    sizes: dict[int, int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    x: torch.Tensor,
    wanted: torch.Tensor,
) -> bool:
    """Whether a module with this weight and bias gives what is wanted for `x`."""
    twin: Any = copy.copy(module)
    twin.__dict__ = {
        key: sizes.get(value, value) if type(value) is int else value for key, value in module.__dict__.items()
    }
    small = {"weight": weight, "bias": bias}
    twin._parameters = {
        key: None if value is None else nn.Parameter(small[key], requires_grad=False)
        for key, value in module._parameters.items()
    }
    try:
        with torch.no_grad():
            y = twin(x)
    except Exception:  # whatever the class demands of its inputs
        return False
    return isinstance(y, torch.Tensor) and y.shape == wanted.shape and torch.allclose(y, wanted, rtol=1e-9, atol=1e-12)


class PlainLinear(nn.Module):
    """A Linear whose weight stays as it is: activations are brought to its dtype, and results back to theirs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x [.., K] -> [.., N] in the dtype of `x`."""
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, bias).to(x.dtype)


def keep_precision(model: nn.Module) -> None:
    """Let plain matrices (routers, Linears in fp32) compute in their own precision, whatever the activations are."""
    for path, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        if type(module).forward is nn.Linear.forward:
            model.set_submodule(path, PlainLinear(module))
        else:
            module.register_forward_pre_hook(_to_dtype_of_weight)


def _to_dtype_of_weight(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    assert isinstance(module.weight, torch.Tensor)
    if not arguments or not isinstance(arguments[0], torch.Tensor) or not torch.is_floating_point(arguments[0]):
        return None
    return (arguments[0].to(module.weight.dtype), *arguments[1:])


def keep_dtype_of_activations(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let norms whose weight is not in the dtype of the model give activations back in theirs.

    transformers brings weights to the dtype of the model when it loads them, which is never done here. Left alone, a
    norm of queries in fp32 would meet values in bf16, and attention refuses that.
    """
    for module in model.modules():
        weight = module._parameters.get("weight")
        if dtype is not None and weight is not None and weight.dim() == 1 and weight.dtype != dtype:
            module.register_forward_hook(_to_dtype_of_input)


def _to_dtype_of_input(_: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
    both = arguments and isinstance(arguments[0], torch.Tensor) and isinstance(result, torch.Tensor)
    return result.to(arguments[0].dtype) if both else result
