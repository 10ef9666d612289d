"""Packed modules put into the places of what they stand for in a transformers model, and the rest filled from the file.

Which place a packed weight has is decided by transformers' own mapping of names, and whether it can stand there by
what the module at that place computes. Where it cannot, the module stays: its weight is unpacked, and `report_kernels`
says why.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.huggingface.conversion import Conversions, Renaming, find_conversions, tied_parameters
from tilewright.kernels.model_names import DOWN, GATE_UP, LAYER_NUMBER
from tilewright.kernels.modules import PackedExperts, PackedLinear
from tilewright.kernels.modules.report import keep_because
from tilewright.kernels.packed.directory import LOWER, UPPER, PackedCheckpoint
from tilewright.kernels.packed.module_spec import Gating

from .experts import ExpertBatches, find_gating
from .linears import why_no_linear
from .stored import StoredTensors

log = logging.getLogger("tilewright")
# Tensors that checkpoints carry and transformers computes or does not use.
CACHE_SCALES = re.compile(r"(?:attn|attention|mixer|[qkv]_proj)\.(?:(?:[qkv]|kv)_scale|output_scale)$")
UNUSED = re.compile(
    r"\.(?:input_scale|input_zero_point|activation_scale|rotary_emb\.inv_freq)$|\.w_[kv]c$|^mtp\.|"
    + CACHE_SCALES.pattern
)


@dataclass
class Placing:
    """One packed directory on its way into a model.

    Attributes:
        model: The model, parameters on the meta device.
        packed: The directory.
        stored: Its tensors.
        conversions: Which of them becomes which parameter.
        places: Path of each packed Linear in the model -> its name in `packed`.
        used: Tensors of `stored` that have found a place.
    """

    model: PreTrainedModel
    packed: PackedCheckpoint
    stored: StoredTensors
    conversions: Conversions
    places: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: PreTrainedModel, packed: PackedCheckpoint) -> Placing:
        """Find the places of a directory's tensors in a model."""
        stored = StoredTensors(packed)
        return cls(model, packed, stored, find_conversions(model, stored.shapes))

    def place_linears(self) -> None:
        """Put packed Linears where modules compute what they compute."""
        for target, conversion in self.conversions.by_target.items():
            path, _, key = target.rpartition(".")
            name = self.stored.linears.get(conversion.sources[0])
            if name is None or key != "weight" or conversion.converter is not None:
                continue
            old, new = self.model.get_submodule(path), self.packed[name]
            assert isinstance(new, PackedLinear)
            n, k = new.spec.whole or new.spec.shape
            if reason := self._why_not(path, old, new, n, k):
                if sorted(old._parameters["weight"].shape) != sorted((n, k)):  # type: ignore[union-attr]
                    found = list(old._parameters["weight"].shape)  # type: ignore[union-attr]
                    raise CheckpointError(f"{self.packed.root}: `{name}` is {[n, k]}, the model needs {found}")
                self._keep(path, old, reason)
                continue
            self.model.set_submodule(path, new)
            self.places[path] = name
            self.used |= {f"{name}.weight", f"{name}.bias"} & self.stored.shapes.keys()

    def _why_not(self, path: str, old: nn.Module, new: PackedLinear, n: int, k: int) -> str:
        bias = self.conversions.by_target.get(f"{path}.bias")
        has_bias = old._parameters.get("bias") is not None
        if has_bias != (new.bias is not None) and (new.bias is not None or bias is not None):
            return "its bias is not packed with its weight"
        if has_bias and new.bias is None:
            return "it has a bias, the packed Linear has none"
        return why_no_linear(old, n, k)

    def _keep(self, path: str, old: nn.Module, reason: str) -> None:
        keep_because(old, reason)
        log.warning("%s: `%s` stays as it is, its weight is unpacked to 16 bits: %s", self.packed.root, path, reason)

    def place_experts(self) -> None:
        """Put packed routed experts where modules compute what they compute."""
        renaming = Renaming(self.model)
        stacks = [name for name, spec in self.packed.specs.items() if len(spec.shape) == 3]
        for name in sorted({name.rpartition(".")[0] for name in stacks if name.endswith((f".{UPPER}", f".{LOWER}"))}):
            if name not in self.packed.experts:
                self.packed.build_experts(name, Gating("silu"))  # says what is wrong
            path = self._experts_path(name, renaming)
            if path is None:
                continue
            old = self.model.get_submodule(path)
            found = find_gating(old)
            if isinstance(found, str):
                self._keep(path, old, found)
                continue
            gating, batches = found
            experts: Any = self.packed.build_experts(name, gating)
            _check_stacks(self.packed, name, old)
            assert isinstance(experts, PackedExperts)
            self.model.set_submodule(path, ExpertBatches(experts) if batches else experts)
            for names in self.stored.experts[name]:
                both = {*names, *(f"{each.removesuffix('.weight')}.bias" for each in names)}
                self.used |= both & self.stored.shapes.keys()

    def _experts_path(self, name: str, renaming: Renaming) -> str | None:
        """Path of the module that holds the stacks of these experts in the model; None if there is none."""
        for tensor in (self.stored.experts[name][0][0], f"{name}.{GATE_UP}", f"{name}.{GATE_UP}.weight"):
            target, _ = renaming.find(tensor)
            if target in renaming:
                return target.rpartition(".")[0]
        return None

    def fill(self) -> list[str]:
        """Give every parameter that is still on the meta device its value; returns those that have none."""
        tied = tied_parameters(self.model)
        tied |= {source: target for target, source in tied.items() if source not in tied}
        state = {**dict(self.model.named_parameters(remove_duplicate=False)), **self._persistent_buffers()}
        blank = {name: tensor for name, tensor in state.items() if tensor.is_meta}
        values: dict[str, torch.Tensor] = {}
        for name in blank:
            conversion = self.conversions.by_target.get(name)
            if conversion is None or name in values:
                continue
            try:
                values |= conversion.read(self.model, self.stored.read)
            except CheckpointError as error:
                raise CheckpointError(f"{self.packed.root}: {error.message}", hint=error.hint) from error
            self.used.update(conversion.sources)
        missing = []
        for name, old in blank.items():
            if name in values:
                self._set(name, values[name], old)
            elif not self._tie(name, tied.get(name), values):
                missing.append(name)
        ignored = [re.compile(pattern) for pattern in self.model._keys_to_ignore_on_load_missing or ()]
        return [name for name in missing if not any(pattern.search(name) for pattern in ignored)]

    def _persistent_buffers(self) -> dict[str, torch.Tensor]:
        state = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in state}

    def _tie(self, name: str, source: str | None, values: dict[str, torch.Tensor]) -> bool:
        """Let a parameter be the one that it is tied to; a packed Linear stands for both."""
        if source is None:
            return False
        path, _, key = name.rpartition(".")
        other, _, source_key = source.rpartition(".")
        module, found = self.model.get_submodule(path), self.model.get_submodule(other)
        if isinstance(found, PackedLinear) and not isinstance(module, nn.Embedding):
            self.model.set_submodule(path, found)
            return True
        value = values.get(source, found._parameters.get(source_key))
        if value is None or value.is_meta:
            return False
        self._set(name, value, module._parameters[key])
        return True

    def _set(self, name: str, value: torch.Tensor, old: Any) -> None:
        path, _, key = name.rpartition(".")
        module = self.model.get_submodule(path)
        if value.shape != old.shape:
            source = self.conversions.by_target[name].sources[0] if name in self.conversions.by_target else name
            found = f"`{source}` is {list(value.shape)}, the model needs {list(old.shape)}"
            raise CheckpointError(f"{self.packed.root}: {found}")
        conversion = self.conversions.by_target.get(name)
        if conversion and any(self.stored.module_of(source) for source in conversion.sources):
            value = value.to(old.dtype)  # it was unpacked
        if key in module._parameters:
            module._parameters[key] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[key] = value

    def unused(self) -> list[str]:
        """Stored modules and tensors that have no place in the model, and should have one."""
        layers = _layer_count(self.model.config)
        ignored = [re.compile(pattern) for pattern in self.model._keys_to_ignore_on_load_unexpected or ()]
        if scales := [name for name in self.stored.shapes if CACHE_SCALES.search(name)]:
            log.warning("%s (of %d): not used, transformers keeps keys and values in 16 bits", scales[0], len(scales))
        tied = {source for name in tied_parameters(self.model) for source in self._sources(name)}
        names = []
        for name in self.stored.shapes.keys() - self.used - tied:
            layer = LAYER_NUMBER.search(name)
            beyond = layer is not None and layers is not None and int(layer[1]) >= layers
            if not beyond and not UNUSED.search(name) and not any(pattern.search(name) for pattern in ignored):
                names.append(self.stored.module_of(name) or name)
        return sorted(set(names))

    def _sources(self, target: str) -> list[str]:
        conversion = self.conversions.by_target.get(target)
        return conversion.sources if conversion else []


def _layer_count(config: Any) -> int | None:
    """Decoder layers of the text model; None if its config counts them in another way."""
    try:
        return int(config.get_text_config(decoder=True).num_hidden_layers)
    except (AttributeError, TypeError, ValueError):
        return None


def _check_stacks(packed: PackedCheckpoint, name: str, old: nn.Module) -> None:
    """Demand that the stacks have as many elements as the parameters that they stand for."""
    for stack, key in ((UPPER, GATE_UP), (LOWER, DOWN)):
        spec, parameter = packed.specs[f"{name}.{stack}"], old._parameters[key]
        assert parameter is not None
        whole = spec.whole or spec.shape
        if math.prod(whole) != parameter.numel():
            found = f"`{name}.{stack}` is {list(whole)}, the model needs {list(parameter.shape)}"
            raise CheckpointError(f"{packed.root}: {found}")
