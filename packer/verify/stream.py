"""Run a causal language model one decoder layer at a time.

The model is built empty. Embedding, final norm and head are filled once; a decoder layer is filled, run over every
window and emptied again, so memory holds one layer and the hidden states, whatever the depth. The model's own forward
serves everything around the layers: each layer is replaced by a `_Probe` that notes how the model calls it (mask,
positions, rotary angles) and hands its input on, or hands out hidden states that were computed before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from tilewright.kernels.errors import VerifyError

from ..malloc_trim import return_freed_pages

Visit = Callable[[nn.Module, str], None]
"""Acts on a module that is found under a dotted path of the model."""


class NotStreamableError(VerifyError):
    """The layers of a model do not run one at a time: something beside the hidden states goes from one to another."""


@dataclass(frozen=True)
class Call:
    """How the model calls one decoder layer for some consecutive tokens: everything but the hidden states.

    Attributes:
        length: Tokens per window.
        kwargs: Keyword arguments; the cache among them is a placeholder.
    """

    length: int
    kwargs: dict[str, Any]


class _Probe(nn.Module):
    """Stands for a decoder layer while the model's own forward runs around it."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self._index = index
        self.calls: list[Call] = []
        self.given: torch.Tensor | None = None
        self.before: _Probe | None = None
        self.result: torch.Tensor | None = None
        for name in ("attention_type", "layer_type"):  # models that mix kinds of attention read them
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, hidden: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor:
        if self.given is not None:
            return self.given
        if others or not isinstance(hidden, torch.Tensor):
            raise NotStreamableError("its layers are called with more than hidden states by position")
        if self.before is not None and hidden is not self.before.result:
            raise NotStreamableError("what a layer gives does not go to the next one as it is")
        self.calls.append(Call(hidden.shape[1], kwargs))
        for value in kwargs.values():
            if isinstance(value, DynamicCache):
                self._mark(value, hidden)
        self.result = hidden.view_as(hidden)
        return self.result

    def _mark(self, cache: DynamicCache, hidden: torch.Tensor) -> None:
        """Let a cache look as after this layer: keys without content, so that the next call sees the right length."""
        layer: Any = cache.layers[self._index] if self._index < len(cache.layers) else None
        if hasattr(layer, "has_previous_state"):
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        if layer is None or hasattr(layer, "update"):
            blank = hidden.new_zeros(1, 1, hidden.shape[1], 1)
            cache.update(blank, blank, self._index)


class _Elsewhere:
    """Stands in a cache for the layers of others, which the one that runs must not need."""

    def __getattr__(self, name: str) -> Any:
        raise NotStreamableError(f"a layer asks for `{name}` of another layer's cache")


class StreamedModel:
    """A causal language model whose decoder layers come and go.

    Args:
        model: The model; its parameters may lie on the meta device.
        fill: Gives a module its weights. Called once with the model itself after its layers were taken out, and with
            each decoder layer before it runs.
        empty: Takes them away again; called with each decoder layer when it has run.
    """

    def __init__(self, model: PreTrainedModel, fill: Visit, empty: Visit) -> None:
        self._model, self._fill, self._empty = model.eval(), fill, empty
        self._decoder: Any = model.get_decoder()
        if not isinstance(getattr(self._decoder, "layers", None), nn.ModuleList) or model.config.is_encoder_decoder:
            raise NotStreamableError(f"{type(model).__name__} has no list of decoder layers")
        path = next(name for name, module in model.named_modules() if module is self._decoder)
        self._layers = [(f"{path}.layers.{index}", layer) for index, layer in enumerate(self._decoder.layers)]
        self._probes = [_Probe(layer, index) for index, (_, layer) in enumerate(self._layers)]
        for probe, before in zip(self._probes[1:], self._probes[:-1], strict=True):
            object.__setattr__(probe, "before", before)  # no child of it
        self._decoder.layers = nn.ModuleList(self._probes)
        fill(model, "")
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, whose layers come and go."""
        model: PreTrainedModel = self._model
        return model

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    @property
    def largest_layer(self) -> int:
        """Weights of the largest decoder layer."""
        return max((sum(t.numel() for t in layer.state_dict().values()) for _, layer in self._layers), default=0)

    def module(self, index: int) -> tuple[str, nn.Module]:
        """Path of decoder layer `index` in the model, and the layer itself, which has weights inside `layer` only."""
        return self._layers[index]

    def embed(self, tokens: torch.Tensor, steps: Sequence[int]) -> tuple[torch.Tensor, list[list[Call]]]:
        """Embed windows, and learn how the model calls its layers for them.

        Args:
            tokens: int64 [B, T].
            steps: Tokens fed at a time with a cache between them: (T,), or (T - D, 1, …, 1) for D decode steps.

        Returns:
            Hidden states [B, T, H] before the first layer, and the calls of each layer in order.
        """
        cache = DynamicCache(config=self._model.config)
        hidden = []
        for part in tokens.split(list(steps), dim=1):
            with _first_input(self._probes[0]) as seen:
                self._decoder(input_ids=part, use_cache=True, **{self._cache_name: cache})
            hidden += seen
        calls = [probe.calls for probe in self._probes]
        for probe in self._probes:
            probe.calls = []
        return torch.cat(hidden, dim=1), calls

    @contextmanager
    def layer(self, index: int) -> Iterator[Callable[[torch.Tensor, Sequence[Call]], torch.Tensor]]:
        """Hold the weights of decoder layer `index` in memory, as a function from hidden states to hidden states."""
        path, layer = self._layers[index]
        self._fill(layer, path)

        def run(hidden: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor:
            cache = self._cache_of(index)
            outputs = []
            for part, call in zip(hidden.split([call.length for call in calls], dim=1), calls, strict=True):
                kwargs = {k: cache if isinstance(v, DynamicCache) else v for k, v in call.kwargs.items()}
                output = layer(part, **kwargs)
                if isinstance(output, tuple) and len(output) != 1:
                    raise NotStreamableError("its layers give more than hidden states")
                outputs.append(output[0] if isinstance(output, tuple) else output)
            return torch.cat(outputs, dim=1)

        try:
            yield run
        finally:
            self._empty(layer, path)
            return_freed_pages()

    def _cache_of(self, index: int) -> DynamicCache:
        """A cache for one layer; what asks it for others is refused."""
        cache = DynamicCache(config=self._model.config)
        others: Any = [layer if number == index else _Elsewhere() for number, layer in enumerate(cache.layers)]
        cache.layers = others
        return cache

    def head(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] from the hidden states [B, T, H] after the last layer."""
        self._probes[-1].given = hidden
        try:
            logits: torch.Tensor = self._model(input_ids=tokens, use_cache=False).logits
        finally:
            self._probes[-1].given = None
            for probe in self._probes:
                probe.calls = []
        return logits


@contextmanager
def _first_input(probe: _Probe) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    handle = probe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()
