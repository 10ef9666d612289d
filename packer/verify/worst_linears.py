"""Which Linears of a packed model cost most: each alone runs as it is served, in the model of the source.

What a Linear adds to the divergence of the whole model is measured, not guessed: the source runs with that one Linear
replaced. As a model has hundreds of them, those whose layer comes out most different are chosen first, which takes
one layer for each, and only they are followed to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tilewright.kernels.modules.linear_kernels import LINEAR_KERNELS
from tilewright.kernels.modules.weight import ACTIVATION_GROUP
from tilewright.kernels.ops.reference import quantize_rows
from tilewright.kernels.packed.module_spec import ModuleSpec

from ..checkpoint.contents import Contents
from .results import LinearLoss
from .stream import StreamedModel

WINDOWS = 4  # that Linears are compared on
FOLLOWED = 12  # Linears that are followed to the end
SHOWN = 10


@dataclass(frozen=True)
class ServedLinear:
    """A Linear as its kernel runs it, in fp32 arithmetic.

    Attributes:
        weight: What its codes stand for, fp32 [N, K], without a rotation.
        spec: What the packed file says of it.
        by_group: Whether its activations are scaled by group.
    """

    weight: torch.Tensor
    spec: ModuleSpec
    by_group: bool

    def sees(self, x: torch.Tensor) -> torch.Tensor:
        """Activations [.., K] as the kernel rounds them, without the rotation."""
        if not LINEAR_KERNELS[self.spec.layout.id].quantizes:
            return x
        group, rotation = ACTIVATION_GROUP if self.by_group else 0, self.spec.rotation
        codes, scales = quantize_rows(x.reshape(-1, x.shape[-1]), group, rotation.block if rotation else 0)
        if group:
            scales = scales.repeat_interleave(group, 1)[:, : x.shape[-1]]
        rounded = codes.to(torch.float32) * scales
        return (rotation.of(rounded) if rotation else rounded).reshape(x.shape)

    @contextmanager
    def in_place_of(self, linear: nn.Linear, *, rounds: bool = True) -> Iterator[None]:
        """Let a Linear of the source be this one for a while; without `rounds` only its weight."""
        kept = linear.weight
        linear.weight = nn.Parameter(self.weight.to(kept.dtype), requires_grad=False)
        handle = linear.register_forward_pre_hook(lambda _, inputs: (self.sees(inputs[0]),)) if rounds else None
        try:
            yield
        finally:
            linear.weight = kept
            if handle:
                handle.remove()


@dataclass(frozen=True)
class WorstLinears:
    """Finds them.

    Attributes:
        reference: The source.
        contents: The candidate's weights.
        modules: The candidate's packed modules.
        by_group: Whether its activations are scaled by group.
    """

    reference: StreamedModel
    contents: Contents
    modules: Mapping[str, ModuleSpec]
    by_group: bool

    @torch.inference_mode()
    def find(self, windows: torch.Tensor) -> tuple[LinearLoss, ...]:
        """The Linears that add most to the divergence, the worst first.

        Args:
            windows: int64 [B, T] tokens; the first `WINDOWS` are used.
        """
        tokens = windows[:WINDOWS]
        distances = self._distances(tokens)
        followed = sorted(distances, key=lambda name: -distances[name])[:FOLLOWED]
        found = self._follow(tokens, followed)
        return tuple(sorted(found, key=lambda loss: -loss.kl)[:SHOWN])

    def _served(self, name: str) -> ServedLinear | None:
        """The Linear of this path as it is served; None if it keeps its numbers."""
        specs = {name: spec for spec in self.modules.values() for name, (spec, _) in spec.linears().items()}
        spec = specs.get(name) or self.modules.get(name)
        weight = self.contents.find(f"{name}.weight")
        if spec is None or weight is None or not spec.format.has_scales:
            return None
        values = weight.values()
        self.contents.forget(weight)
        return ServedLinear(values, spec, self.by_group)

    def _linears(self, index: int) -> dict[str, nn.Linear]:
        path, layer = self.reference.module(index)
        named = layer.named_modules(prefix=path)
        return {name: module for name, module in named if isinstance(module, nn.Linear)}

    def _distances(self, tokens: torch.Tensor) -> dict[str, float]:
        """Path of each Linear -> relative squared change of what its layer gives."""
        hidden, calls = self.reference.embed(tokens, [tokens.shape[1]])
        distances: dict[str, float] = {}
        for index in range(self.reference.depth):
            with self.reference.layer(index) as run:
                after = run(hidden, calls[index])
                for name, linear in self._linears(index).items():
                    if served := self._served(name):
                        with served.in_place_of(linear):
                            change = run(hidden, calls[index]) - after
                        distances[name] = float(change.square().sum() / after.square().sum())
            hidden = after
        return distances

    def _follow(self, tokens: torch.Tensor, names: list[str]) -> list[LinearLoss]:
        """What each of these Linears adds, alone in the model of the source: with its weight, and with all."""
        hidden, calls = self.reference.embed(tokens, [tokens.shape[1]])
        variants: dict[tuple[str, bool], torch.Tensor] = {}
        for index in range(self.reference.depth):
            with self.reference.layer(index) as run:
                variants = {key: run(states, calls[index]) for key, states in variants.items()}
                mine = {name: linear for name, linear in self._linears(index).items() if name in names}
                for name, linear in mine.items():
                    served = self._served(name)
                    assert served
                    for rounds in (False, True):
                        with served.in_place_of(linear, rounds=rounds):
                            variants[name, rounds] = run(hidden, calls[index])
                hidden = run(hidden, calls[index])
        wanted = F.log_softmax(self.reference.head(tokens, hidden).float(), -1)
        kl = {key: _divergence(wanted, self.reference.head(tokens, states)) for key, states in variants.items()}
        return [LinearLoss(name, kl[name, True], kl[name, False]) for name in names]


def _divergence(wanted: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL(reference || candidate) in nats."""
    found = F.log_softmax(logits.float(), -1)
    return float((wanted.exp() * (wanted - found)).sum(-1, dtype=torch.float64).mean())
