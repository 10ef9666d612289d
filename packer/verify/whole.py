"""Level `model` for models whose layers do not run one at a time: their own forward passes, side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tilewright.kernels.errors import TilewrightError, VerifyError
from tilewright.kernels.huggingface.classes import first_words

from ..progress import Progress, Silent
from .distributions import AgreementSum
from .model import BATCH_TOKENS, Drift
from .results import LayerDrift, ModelResult
from .stream import Visit

KEPT = 1 << 30  # bytes of fp32 weights up to which a model is filled once; larger ones a layer at a time, in each pass


class WholeModel:
    """A model that is run as it is; the weights of its layers come and go if they are many.

    Args:
        model: The model; its parameters may lie on the meta device.
        fill: Gives a module its weights, as for `StreamedModel`.
        empty: Takes them away again.
    """

    def __init__(self, model: PreTrainedModel, fill: Visit, empty: Visit) -> None:
        if model.main_input_name != "input_ids":
            raise VerifyError(
                f"{type(model).__name__} predicts text from `{model.main_input_name}`, which no text holds",
                hint="levels weights and layers run without",
            )
        self._model: Any = model.eval()
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
        outer = [one for one in lists if not any(one is not other and _holds(other, one) for other in lists)]
        come_and_go = 4 * sum(parameter.numel() for parameter in model.parameters()) > KEPT
        held = [(one, one._modules) for one in outer if come_and_go]
        paths = {module: path for path, module in model.named_modules()}
        for one, _ in held:
            for layer in one:
                _let_come_and_go(layer, paths[layer], fill, empty)
            one._modules = {}
        fill(model, "")
        for one, layers in held:
            one._modules = layers
        decoder = set(model.get_decoder().modules())
        inner = [one for one in outer if one in decoder] or outer
        self._layers = max(inner, key=_size, default=nn.ModuleList())
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def depth(self) -> int:
        """Number of layers whose hidden states are compared."""
        return len(self._layers)

    def run(self, tokens: torch.Tensor, steps: Sequence[int]) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Run windows [B, T], `steps` tokens at a time with a cache between them.

        Returns:
            Logits [B, T, V], and for each layer the hidden states that it gives in each step [.., H].
        """
        seen: list[list[torch.Tensor]] = [[] for _ in self._layers]
        handles = [layer.register_forward_hook(_noted(seen[index])) for index, layer in enumerate(self._layers)]
        logits, cache = [], None
        try:
            for part in tokens.split(list(steps), dim=1):
                output = self._model(**self._inputs(tokens, part), use_cache=True, **{self._cache_name: cache})
                cache = getattr(output, self._cache_name, None)
                logits.append(output.logits.to(torch.float32))
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(logits, dim=1), seen

    def _inputs(self, tokens: torch.Tensor, part: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._model.config.is_encoder_decoder:
            return {"input_ids": tokens, "decoder_input_ids": part}
        return {"input_ids": part}


def _let_come_and_go(layer: nn.Module, path: str, fill: Visit, empty: Visit) -> None:
    """Fill a layer when it is called, and empty it when it has run."""
    layer.register_forward_pre_hook(lambda module, _: fill(module, path))
    layer.register_forward_hook(lambda module, _, __: empty(module, path))


def _size(layers: nn.ModuleList) -> int:
    """Elements of parameters and packed tensors."""
    return sum(tensor.numel() for tensor in (*layers.parameters(), *layers.buffers()))


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _noted(seen: list[torch.Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor):
            seen.append(hidden)

    return note


def compare_whole(
    sides: Sequence[WholeModel], windows: torch.Tensor, decode_steps: int, progress: Progress | None = None
) -> ModelResult:
    """Run the models of both sides, reference first, and compare what they predict.

    Args:
        sides: Reference, candidate, and with a third the candidate's weights in fp32 arithmetic.
        windows: int64 [B, T] tokens.
        decode_steps: Last tokens of each window that are fed one at a time.
        progress: Hears of the batches done.

    Raises:
        VerifyError: transformers cannot run one of them on text.
    """
    steps = [windows.shape[1] - decode_steps] + [1] * decode_steps
    overall, decode, weights = AgreementSum(), AgreementSum(), AgreementSum()
    drifts = [Drift() for _ in range(sides[0].depth)]
    progress = progress or Silent()
    parts = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
    progress.start("verifying the model", len(parts), unit="batches")
    try:
        with torch.inference_mode():
            for tokens in parts:
                (logits, hidden), *others = [_run(side, tokens, steps) for side in sides]
                targets = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -1)), dim=1)
                overall.add(logits, others[0][0], targets)
                if decode_steps:
                    decode.add(logits[:, steps[0] :], others[0][0][:, steps[0] :], targets[:, steps[0] :])
                if len(others) > 1:
                    weights.add(logits, others[1][0], targets)
                for drift, ours, theirs in zip(drifts, hidden, others[0][1], strict=True):
                    for step, same in zip(ours, theirs, strict=True):
                        drift.add(step, same)
                progress.advance()
    finally:
        progress.finish()
    return ModelResult(
        windows=windows.shape[0],
        window=windows.shape[1],
        decode_steps=decode_steps,
        overall=overall.result(),
        decode=decode.result() if decode_steps else None,
        drift=tuple(_results(drifts)),
        weights_only=weights.result() if len(sides) > 2 else None,
    )


def _results(drifts: Sequence[Drift]) -> list[LayerDrift]:
    return [drift.result(number) for number, drift in enumerate(drifts) if drift.tokens]


def _run(side: WholeModel, tokens: torch.Tensor, steps: Sequence[int]) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    try:
        return side.run(tokens, steps)
    except TilewrightError:
        raise
    except Exception as error:  # whatever the forward pass of a class of transformers comes upon
        name = type(side._model).__name__
        raise VerifyError(f"{name} of transformers does not run on text: {first_words(error)}") from error
