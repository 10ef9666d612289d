"""Tensor names grouped into weights, each read by the first encoding that claims it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.kernels.tensors import Reject, TensorSpec

from ..families import family_of
from ..families.experts import ExpertSpellings
from .encoding import ACTIVATION_SUFFIXES, StoredWeight, TensorGroup
from .encodings import ENCODINGS

READABLE = ("fp8", "compressed-tensors", "w8a8_int8", "w4afp8", "blockwise_int8", "modelopt")


@dataclass(frozen=True)
class Inventory:
    """What a source holds.

    Attributes:
        weights: Every matrix and stack of matrices, in source order.
        loose: Names of all other tensors, in source order.
        rejects: What cannot be read.
    """

    weights: list[StoredWeight] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization block of a config.json, also where an older tool nested it."""
    for holder in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), Mapping):
                found: Mapping[str, Any] = holder[key]
                return found
    return {}


def detect_weights(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> Inventory:
    """Group the tensors of a source into weights.

    Args:
        specs: Tensor name -> specification, in source order.
        config: The source's config.json.

    Returns:
        The inventory; each name of `specs` is in exactly one weight, in `loose`, or behind a reject.
    """
    block = quantization_config(config)
    inventory = Inventory()
    method = block.get("quant_method")
    if block and method not in READABLE:
        hint = "pack-for-cpu --unpack turns it back" if method == "tilewright" else f"known: {', '.join(READABLE)}"
        what = "already packed" if method == "tilewright" else f"quantized by `{method}`, which is not read"
        inventory.rejects.append(Reject("config.json", f"the source is {what}", hint))
    groups = _groups(specs, block, family_of(config).experts)
    owned = {name for group in groups.values() for name in group.names.values()}
    for name in specs:
        if name in groups:
            _claim(groups[name], inventory)
        elif name not in owned:
            _loose(name, inventory)
    return inventory


def _claim(group: TensorGroup, inventory: Inventory) -> None:
    """Add the weight that a group is, or what else becomes of its tensors."""
    first, *further = [suffix for suffix in _code_suffixes() if suffix in group.names]
    if further:
        names = group.names
        inventory.rejects.append(Reject(names[first], f"stands beside `{names[further[0]]}`: which one counts?"))
        return
    found = next((found for encoding in ENCODINGS.values() if (found := encoding.detect(group)) is not None), None)
    if isinstance(found, Reject):
        inventory.rejects.append(found)
    elif found is not None:
        shared = tuple(group.specs[suffix].shape[:1] == found.shape[:1] for suffix in _suffixes_of(found, group))
        inventory.weights.append(replace(found, bare=group.names.get("weight") == group.module, per_expert=shared))
    elif len(group.specs) > 1:
        partners = ", ".join(sorted(set(group.specs) - {first}))
        reason = f"is {group.specs[first].dtype} with {partners}, which is not read"
        inventory.rejects.append(group.reject(reason, suffix=first))
    else:
        inventory.loose.extend(group.names.values())


def _suffixes_of(weight: StoredWeight, group: TensorGroup) -> list[str]:
    suffixes = {name: suffix for suffix, name in group.names.items()}
    return [suffixes[name] for name in weight.tensors]


def _code_suffixes() -> list[str]:
    """Suffixes of the tensors that hold codes or values, in any encoding."""
    return list(dict.fromkeys(encoding.suffixes[0] for encoding in ENCODINGS.values()))


def _loose(name: str, inventory: Inventory) -> None:
    if name.rpartition(".")[2] in {"weight_scale_inv", "weight_scale"}:
        inventory.rejects.append(Reject(name, "is a scale without its weight", "fetch the checkpoint again"))
    else:
        inventory.loose.append(name)


def _groups(
    specs: Mapping[str, TensorSpec], config: Mapping[str, Any], experts: ExpertSpellings
) -> dict[str, TensorGroup]:
    """Name of the codes -> group, for every module path that has a tensor of codes which could be a matrix."""
    codes = _code_suffixes()
    suffixes = (suffix for encoding in ENCODINGS.values() for suffix in encoding.suffixes)
    known = {suffix: place for place, suffix in enumerate(dict.fromkeys((*suffixes, *ACTIVATION_SUFFIXES)))}
    modules: dict[str, dict[str, str]] = {}
    for name in specs:
        if found := _split(name, known, experts):
            modules.setdefault(found[0], {})[found[1]] = name
    groups: dict[str, TensorGroup] = {}
    for module, found_names in modules.items():
        first = next((found_names[suffix] for suffix in codes if suffix in found_names), None)
        if first is None or len(specs[first].shape) < 2:
            continue
        if (spelled := f"{experts.short(module)}.input_scale") in specs:
            found_names.setdefault("input_scale", spelled)
        names = dict(sorted(found_names.items(), key=lambda item: known[item[0]]))
        group_specs = {suffix: specs[name] for suffix, name in names.items()}
        groups[first] = TensorGroup(module, group_specs, names, config, experts.find_stack(module) is not None)
    return groups


def _split(name: str, known: Mapping[str, int], experts: ExpertSpellings) -> tuple[str, str] | None:
    """Module path and suffix of a tensor; what lies beside a stack, which has no `.weight`, begins with its name."""
    parts = name.split(".")
    for count in range(min(3, len(parts) - 1), 0, -1):
        if (suffix := ".".join(parts[-count:])) in known:
            return ".".join(parts[:-count]), suffix
    if experts.find_stack(name):
        return name, "weight"
    if beside := experts.split_stack(name):
        stack, rest = beside
        return next(((stack, suffix) for suffix in (rest, f"weight_{rest}") if suffix in known), None)
    return None
