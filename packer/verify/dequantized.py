"""A streamed model that computes in fp32 with the weights that a directory stands for: plain, or dequantized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tilewright.kernels.errors import CheckpointError, VerifyError
from tilewright.kernels.huggingface.buffers import compute_buffers
from tilewright.kernels.huggingface.classes import build_empty, read_config
from tilewright.kernels.huggingface.conversion import Renaming, find_conversions, tied_parameters
from tilewright.kernels.huggingface.stacks import holds_transposed

from ..checkpoint.contents import Contents
from ..families import family_of
from ..families.experts import LONG, Projection
from .stream import StreamedModel, Visit

HINT = "levels weights and layers of verify-accuracy, and solvers without a text, need no architecture"
BIAS = "bias"


def model_config(root: Path) -> PreTrainedConfig:
    """The config of a model directory as transformers reads it; nothing is fetched.

    Raises:
        VerifyError: transformers does not know this architecture.
    """
    try:
        return read_config(root)
    except CheckpointError as error:
        raise VerifyError(error.message, hint=HINT) from error


def dequantized_model(config: PreTrainedConfig, contents: Contents) -> tuple[PreTrainedModel, Visit, Visit]:
    """The model of a config without weights, computed tables in place, and what fills and empties a module of it.

    Raises:
        VerifyError: transformers has no such model.
    """
    try:
        model = build_empty(config, dtype=torch.float32)
    except CheckpointError as error:
        raise VerifyError(f"{contents.title}: {error.message}", hint=HINT) from error
    unknown = compute_buffers(model)
    if unknown:
        raise VerifyError(f"{contents.title}: how {', '.join(unknown[:3])} is computed is not known")
    weights = _Weights(model, contents)

    def fill(module: nn.Module, path: str) -> None:
        state = {
            name: weights.read(f"{path}.{name}" if path else name, tuple(blank.shape))
            for name, blank in module.state_dict().items()
            if blank.is_meta
        }
        module.load_state_dict(state, assign=True, strict=False)
        weights.forget()

    def empty(module: nn.Module, _: str) -> None:
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    return model, fill, empty


def stream_dequantized(config: PreTrainedConfig, contents: Contents) -> StreamedModel:
    """Run the weights of `contents` in fp32, one layer at a time.

    Raises:
        VerifyError: A parameter of the architecture is not in the directory, or not in its shape.
    """
    return StreamedModel(*dequantized_model(config, contents))


class _Weights:
    """The parameters of a model, made of the weights of a directory by transformers' own mapping of names.

    Args:
        model: The model, parameters on the meta device.
        contents: The weights.
    """

    def __init__(self, model: PreTrainedModel, contents: Contents) -> None:
        self._model, self._contents = model, contents
        shapes = {name: weight.shape for name, weight in contents.weights.items()}
        found = find_conversions(model, shapes)
        self._conversions = found.by_target
        self._stacks = dict(self._find_stacks(found.unplaced))
        tied = tied_parameters(model)
        self._tied = {source: target for target, source in tied.items()} | tied
        self._made: dict[str, torch.Tensor] = {}
        self._transposed = self._finds_transposed()

    def _finds_transposed(self) -> set[str]:
        """Parameters that hold [K, N] where the directory's matrices are [N, K]: those of the class `Conv1D`, if any.

        The class is asked as a whole, as square matrices do not tell; it has some that are not square.
        """
        names = [f"{path}.weight" for path, module in self._model.named_modules() if isinstance(module, Conv1D)]
        for name in names:
            shape, found = tuple(self._model.get_parameter(name).shape), self._shape(name)
            if found and found != shape and found == shape[::-1]:
                return set(names)
        return set()

    def _shape(self, name: str) -> tuple[int, ...] | None:
        conversion = self._conversions.get(name)
        weight = self._contents.find(conversion.sources[0]) if conversion and not conversion.converter else None
        return weight.shape if weight else None

    def forget(self) -> None:
        """Give back what was made beside the parameters that were asked for."""
        self._made = {}

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The values of one parameter; fp32."""
        values = self._find(name)
        if values is None and name in self._tied:
            values = self._find(self._tied[name])
        if values is None:
            values = self._values(name) if self._contents.find(name) else None
        if values is not None and name in self._transposed:
            values = values.T.contiguous()
        if values is None or tuple(values.shape) != shape:
            is_there = f"has shape {list(values.shape)}" if values is not None else "is missing"
            reason = f"{self._contents.title}: `{name}` {is_there}, the architecture wants {list(shape)}"
            raise VerifyError(reason)
        return values

    def _find(self, name: str) -> torch.Tensor | None:
        if name in self._made:
            return self._made.pop(name)
        if name in self._stacks:
            return self._stack(name, *self._stacks[name])
        if name not in self._conversions:
            return None
        try:
            self._made |= self._conversions[name].read(self._model, self._values)
        except CheckpointError as error:
            raise VerifyError(f"{self._contents.title}: {error.message}") from error
        return self._made.pop(name, None)

    def _values(self, name: str) -> torch.Tensor:
        weight = self._contents.find(name)
        assert weight is not None
        values = weight.values()
        self._contents.forget(weight)
        return values

    def _find_stacks(self, unplaced: list[str]) -> Iterator[tuple[str, tuple[str, tuple[Projection, ...], str]]]:
        """Stacks that the model holds and the directory has as matrices of each expert.

        Yields:
            Name of a parameter, then the experts that it holds, which of their matrices, and weight or bias.
        """
        experts = family_of(self._model.config.to_dict()).experts
        paths = (experts.find(name.rpartition(".")[0]) for name in unplaced)
        renaming = Renaming(self._model)
        kinds = {name: tuple(experts.projections[part] for part in parts) for name, parts in experts.stacks.items()}
        long: dict[str, tuple[Projection, ...]] = {LONG.gate_up: ("gate", "up"), LONG.down: ("down",)}
        for container in sorted({path.container for path in paths if path}):
            for stack, parts in (kinds | long).items():
                for suffix, kind in (("", "weight"), (".weight", "weight"), (f"_{BIAS}", BIAS)):
                    target, _ = renaming.find(f"{container}.{stack}{suffix}")
                    if target in renaming and target not in self._conversions:
                        yield target, (container, parts, kind)

    def _stack(self, target: str, container: str, parts: tuple[Projection, ...], kind: str) -> torch.Tensor:
        """A stack in the arrangement of the module that holds it."""
        module: Any = self._model.get_submodule(target.rpartition(".")[0])
        shape = self._model.get_parameter(target).shape
        spelled = {projection: name for names in self._spellings(container) for name, projection in names.items()}
        rows: list[torch.Tensor] = []
        for expert in range(shape[0]):
            matrices = [self._values(f"{container}.{expert}.{spelled[part]}.{kind}") for part in parts]
            both = len(matrices) == 2 and not getattr(module, "is_concatenated", True)
            rows.append(torch.stack(matrices, 1).flatten(0, 1) if both else torch.cat(matrices))
        stack = torch.stack(rows)
        if kind == "weight" and holds_transposed(module, stack.shape, shape):
            stack = stack.mT.contiguous()
        return stack

    def _spellings(self, container: str) -> Iterator[dict[str, Projection]]:
        for names in family_of(self._model.config.to_dict()).experts.names:
            if f"{container}.0.{names.down}.weight" in self._contents.weights:
                yield names.projections
