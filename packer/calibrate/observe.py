"""Watch what the Linears and the experts of one decoder layer are fed while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..families.experts import LONG
from .statistics import InputStatistics

ENOUGH = 512  # tokens below which an expert borrows some of its layer: four of the largest groups
BORROWED = 0.125  # how much a borrowed token counts in the Hessian


@dataclass
class ExpertInputs:
    """Everything that a module of fused experts was fed in one layer.

    Attributes:
        module: The module; holds `gate_up_proj` [E, 2I, H], gate rows first, and `down_proj` [E, H, I].
        tokens: Hidden states [T, H] by batch.
        chosen: int64 [T, top-k] experts of each token by batch.
    """

    module: Any
    tokens: list[torch.Tensor] = field(default_factory=list)
    chosen: list[torch.Tensor] = field(default_factory=list)

    @property
    def experts(self) -> int:
        """Number of experts E."""
        return int(self.module.gate_up_proj.shape[0])

    def counts(self) -> torch.Tensor:
        """int64 [E], tokens that went to each expert."""
        return torch.bincount(torch.cat(self.chosen).flatten(), minlength=self.experts + 1)[: self.experts]

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of one expert's gate and up projections.

        An expert that saw fewer than `ENOUGH` tokens borrows others of the layer, evenly spaced: what the router did
        not send there today is the best guess at what it will send tomorrow.

        Returns:
            fp32 [T', H] tokens, and fp32 [T'] how much each counts: 1, or `BORROWED`.
        """
        tokens, chosen = self._joined()
        mine = (chosen == expert).any(1)
        own, others = mine.nonzero().flatten(), (~mine).nonzero().flatten()
        lacking = min(max(ENOUGH - len(own), 0), len(others))
        positions = torch.linspace(0, max(len(others) - 1, 0), lacking, dtype=torch.float64).round().to(torch.int64)
        rows = torch.cat((own, others[positions]))
        weights = torch.cat((torch.ones(len(own)), torch.full((lacking,), BORROWED)))
        return tokens[rows].to(torch.float32), weights

    def _joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens and choices; batches are joined once, not for every expert."""
        if len(self.tokens) > 1:
            self.tokens[:], self.chosen[:] = [torch.cat(self.tokens)], [torch.cat(self.chosen)]
        return self.tokens[0], self.chosen[0]

    def inner(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        """What the down projection of an expert is fed for `inputs` [T', H] of the expert: [T', I]."""
        product: torch.Tensor = self.module._apply_gate(nn.functional.linear(inputs, self.module.gate_up_proj[expert]))
        return product


@dataclass
class Observed:
    """What was seen while one layer ran.

    Attributes:
        linears: Path of a Linear -> statistics of its inputs; Linears that are fed the same tensor share one object.
        experts: Path of a module of fused experts -> what it was fed.
    """

    linears: dict[str, InputStatistics] = field(default_factory=dict)
    experts: dict[str, ExpertInputs] = field(default_factory=dict)


@contextmanager
def observe(layer: nn.Module, path: str, with_hessian: bool, with_sample: bool = False) -> Iterator[Observed]:
    """Watch a layer for as long as the context lasts.

    Args:
        layer: A decoder layer.
        path: Its path, the beginning of every path in the result.
        with_hessian: Whether the Hessians of Linears are wanted.
        with_sample: Whether some of their inputs are wanted themselves.
    """
    observed = Observed()
    last: list[tuple[torch.Tensor, str]] = []  # the latest input and the Linear that was fed it first
    handles = []

    def linear_hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            if last and last[0][0] is x:
                observed.linears[name] = observed.linears[last[0][1]]
                return
            last[:] = [(x, name)]
            if name not in observed.linears:
                observed.linears[name] = InputStatistics(x.shape[-1], with_hessian, with_sample)
            observed.linears[name].add(x)

        return hook

    def experts_hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            tokens, chosen = (*inputs, *named.values())[:2]
            seen = observed.experts.setdefault(name, ExpertInputs(module))
            seen.tokens.append(tokens.reshape(-1, tokens.shape[-1]))
            seen.chosen.append(chosen.reshape(-1, chosen.shape[-1]))

        return hook

    for name, module in layer.named_modules(prefix=path):
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(linear_hook(name)))
        elif fused_experts(module):
            handles.append(module.register_forward_pre_hook(experts_hook(name), with_kwargs=True))
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()


def fused_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer in plain stacks [E, 2I, H] and [E, H, I]."""
    stacks = [getattr(module, name, None) for name in (LONG.gate_up, LONG.down)]
    return (
        all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks)
        and hasattr(module, "_apply_gate")
        and not getattr(module, "is_transposed", False)
        and not getattr(module, "has_bias", False)
    )
