"""Routed experts of a transformers model that the packed ones can stand for, found by comparison."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from tilewright.kernels.huggingface.classes import first_words
from tilewright.kernels.huggingface.stacks import holds_transposed
from tilewright.kernels.model_names import DOWN, GATE_UP
from tilewright.kernels.modules import PackedExperts
from tilewright.kernels.ops.experts import ACTIVATIONS
from tilewright.kernels.ops.reference_experts import gated
from tilewright.kernels.packed.module_spec import Gating

EXPERTS, HIDDEN, INNER = 3, 8, 16  # of the copy that is tried out
MAGNITUDES = (0.1, 1.0, 3.0, 10.0, 40.0)  # of its inputs: products on both sides of every bound
STACKS = (GATE_UP, DOWN)


class ExpertBatches(nn.Module):
    """Experts that are called with as many rows for each of them, one expert after the other, as Llama 4 does.

    Args:
        experts: The packed experts.
    """

    def __init__(self, experts: PackedExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run rows [E * T, H], T for each expert in ascending order, to rows of the same shape."""
        whole = self.experts.w13.spec.whole or self.experts.w13.spec.shape
        rows = len(hidden_states) // whole[0]
        numbers = torch.arange(whole[0], device=hidden_states.device).repeat_interleave(rows)
        ones = torch.ones(len(numbers), 1, device=hidden_states.device)
        return self.experts(hidden_states, numbers[:, None], ones)  # type: ignore[no-any-return]


def find_gating(old: Any) -> tuple[Gating, bool] | str:
    """The gating by which packed experts compute what a module computes, tried out with small matrices.

    config.json does not say it all: GPT-OSS calls its clamped gate `silu`, some families bound theirs layer by layer.

    Args:
        old: The module, whose parameters are not read.

    Returns:
        The gating, and whether the module is called with batches of rows (`ExpertBatches`); or why there is none.
    """
    name = type(old).__name__
    tensors = {*old._parameters, *old._buffers}
    if not set(STACKS) <= tensors <= {key for stack in STACKS for key in (stack, f"{stack}_bias")}:
        return f"{name} holds {', '.join(sorted(tensors)) or 'no stacks'}, packed experts are gate, up and down"
    shapes = [tuple(old._parameters[stack].shape) for stack in STACKS]
    if any(len(shape) != 3 for shape in shapes) or shapes[0][0] != shapes[1][0]:
        return f"{name} holds {' and '.join(str(list(shape)) for shape in shapes)}, no stacks of as many matrices"
    batches = len(inspect.signature(old.forward).parameters) == 1
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(EXPERTS, INNER, HIDDEN, generator=generator) for _ in range(2))
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    x = torch.cat([size * torch.randn(EXPERTS, HIDDEN, generator=generator) for size in MAGNITUDES])
    wanted = _outputs(old, gate, up, down, x, batches)
    if isinstance(wanted, str):
        return wanted
    alpha, limit = float(getattr(old, "alpha", Gating.alpha)), float(getattr(old, "limit", Gating.limit))
    for activation in ACTIVATIONS:
        found = _expected(gate, up, down, x, batches, Gating(activation, alpha, limit))
        if torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
            return Gating(activation, alpha, limit), batches
    return f"{name} computes something else between its products than {', '.join(ACTIVATIONS)}"


def _routing(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of rows: two different experts each."""
    first = torch.arange(rows) % EXPERTS
    weights = torch.linspace(0.2, 0.9, 2 * rows).reshape(rows, 2)
    return torch.stack([first, (first + 1) % EXPERTS], 1), weights


def _expected(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, batches: bool, gating: Gating
) -> torch.Tensor:
    """What experts compute with a gating: fp32 [rows, H]."""

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        inner = gated(rows @ gate[number].T, rows @ up[number].T, gating.activation, gating.alpha, gating.limit)
        return inner @ down[number].T

    if batches:
        return torch.cat([expert(number, rows) for number, rows in enumerate(x.chunk(EXPERTS))])
    ids, weights = _routing(len(x))
    y = torch.zeros_like(x)
    for token, (numbers, factors) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for number, factor in zip(numbers, factors, strict=True):
            y[token] += factor * expert(number, x[token, None])[0]
    return y


def _outputs(
    old: Any, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, batches: bool
) -> torch.Tensor | str:
    """What a copy of the module with these matrices computes; or why it could not be run."""
    twin = _twin(old, gate, up, down)
    try:
        with torch.no_grad():
            y = twin(x) if batches else twin(x, *_routing(len(x)))
    except Exception as error:  # whatever the class demands of its inputs
        return f"{type(old).__name__} is not called as routed experts are: {first_words(error)}"
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return f"{type(old).__name__} is not called as routed experts are"
    if not batches and _answers_beyond(twin, x):
        return f"{type(old).__name__} has a result for experts beyond those of its stacks"
    return y.float()


def _answers_beyond(twin: Any, x: torch.Tensor) -> bool:
    """Whether a token that is sent to an expert after the last one gets a result, as from LongCat's zero experts.

    The class itself is asked: grouped products that transformers may run in its place leave such rows as memory is.
    """
    ids, weights = _routing(len(x))
    if getattr(twin, "config", None) is not None:
        twin.__dict__["config"] = copy.copy(twin.config)
        twin.config._experts_implementation = "eager"
    try:
        with torch.no_grad():
            return bool(twin(x, torch.full_like(ids, EXPERTS), weights).any())
    except Exception:  # then nothing is sent there
        return False


def _twin(old: Any, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Any:
    """A copy of a module with small matrices, in the arrangement that its class declares or its shapes show."""
    lower = old._parameters[DOWN]
    transposed = holds_transposed(old)
    joined = torch.cat([gate, up], 1)
    if not getattr(old, "is_concatenated", True):
        joined = torch.stack([gate, up], 2).flatten(1, 2)
    hidden, inner = (lower.shape[2], lower.shape[1]) if transposed else (lower.shape[1], lower.shape[2])
    small = {GATE_UP: joined.mT if transposed else joined, DOWN: down.mT if transposed else down}
    small |= {f"{GATE_UP}_bias": torch.zeros(EXPERTS, 2 * INNER), f"{DOWN}_bias": torch.zeros(EXPERTS, HIDDEN)}

    def size(key: str, value: Any) -> Any:
        if type(value) is not int:
            return value
        if ("num" in key or "experts" in key) and value == lower.shape[0]:
            return EXPERTS
        if value == inner and (inner != hidden or "inter" in key or "expert" in key):
            return INNER
        return HIDDEN if value == hidden else 2 * INNER if value == 2 * inner else value

    twin = copy.copy(old)
    twin.__dict__ = {key: size(key, value) for key, value in old.__dict__.items()}
    twin._parameters = {key: nn.Parameter(small[key].contiguous(), requires_grad=False) for key in old._parameters}
    return twin
