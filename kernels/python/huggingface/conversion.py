"""What transformers makes of the tensors of a checkpoint: which parameters of a model each of them becomes part of.

transformers renames tensors when it loads a model, and joins, splits or transposes some of them
(`transformers.conversion_mapping`). The same mapping is read here, so that packed modules find their places, and
weights that are read one layer at a time their parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ..errors import CheckpointError
from .classes import first_words


@dataclass
class Conversion:
    """Tensors of a checkpoint that become one or several parameters of a model.

    Attributes:
        targets: Names of the parameters.
        sources: Names of the tensors in the order in which they are taken.
        converter: What transformers does with them; None if the one tensor becomes the one parameter as it is.
    """

    targets: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    converter: WeightConverter | None = None
    _patterns: list[str] = field(default_factory=list)

    def read(self, model: PreTrainedModel, tensor: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values of the parameters.

        Args:
            model: The model.
            tensor: Gives each tensor by its name.

        Raises:
            CheckpointError: transformers cannot convert tensors of these shapes.
        """
        if self.converter is None:
            return {self.targets[0]: tensor(self.sources[0])}
        return self._convert(model, self.targets[0], tensor)

    def _convert(
        self, model: PreTrainedModel, target: str, tensor: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        converter: Any = copy.deepcopy(self.converter)
        for name, pattern in zip(self.sources, self._patterns, strict=True):
            converter.add_tensor(target, name, pattern, tensor(name))
        try:
            made = converter.convert(target, model=model, config=model.config)
        except Exception as error:  # transformers raises whatever its operations come upon
            names = ", ".join(self.sources[:3]) + (", …" if len(self.sources) > 3 else "")
            raise CheckpointError(f"`{target}` cannot be made of {names}: {first_words(error)}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class Conversions:
    """How the tensors of a checkpoint become the parameters of a model.

    Attributes:
        by_target: Name of each parameter that can be made -> how.
        unplaced: Tensors that the model has no place for.
    """

    by_target: dict[str, Conversion]
    unplaced: list[str]


class Renaming:
    """The mapping of names of one model, asked one name at a time, in ascending order.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._state = model.state_dict()
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}

    def find(self, name: str) -> tuple[str, str | None]:
        """What the tensor is called in the model (in its state or not), and the pattern of what converts it."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if target not in self._state and name in self._state:  # it was in the model's own names already
            target, pattern = rename_source_key(name, [], [], self._prefix, self._state)
        return target, pattern

    def converter(self, pattern: str) -> WeightConverter:
        """What converts tensors that a pattern has matched."""
        return self._by_pattern[pattern]

    def __contains__(self, target: str) -> bool:
        return target in self._state


def find_conversions(model: PreTrainedModel, shapes: Mapping[str, Iterable[int]]) -> Conversions:
    """Find the place of every tensor.

    Args:
        model: The model; its parameters may lie on the meta device.
        shapes: Name and shape of every tensor of the checkpoint.
    """
    renaming = Renaming(model)
    found: dict[str, Conversion] = {}
    unplaced: list[str] = []
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = renaming.find(name)
        if target not in renaming:
            unplaced.append(name)
            continue
        conversion = found.setdefault(target, Conversion([target]))
        if pattern is None and conversion.sources:
            unplaced.append(name)
            continue
        conversion.sources.append(name)
        if pattern is not None:
            conversion.converter = renaming.converter(pattern)
            conversion._patterns.append(pattern)
    by_target: dict[str, Conversion] = {}
    for conversion in found.values():
        if conversion.converter is not None and len(conversion.converter.target_patterns) > 1:
            made = conversion._convert(model, conversion.targets[0], lambda name: _blank(shapes[name]))
            conversion.targets = list(made)
        by_target |= dict.fromkeys(conversion.targets, conversion)
    return Conversions(by_target, unplaced)


def _blank(shape: Iterable[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), device="meta")


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Name of a parameter -> the one whose values it shares, as the class and its config say."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
