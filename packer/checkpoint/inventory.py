"""Tensor names grouped into weights, each read by the first detector that knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.kernels.tensors import Reject, TensorSpec
from tilewright.packer.families.base import STACK, W_NAMES

from . import int4, plain, scaled
from .base import SUFFIXES, Group, SourceWeight

DETECTORS = (int4.detect_packed, int4.detect_w4afp8, scaled.detect, plain.detect)
READABLE = ("fp8", "compressed-tensors", "w8a8_int8", "w4afp8", "blockwise_int8", "modelopt")


@dataclass(frozen=True)
class Inventory:
    """What a source holds.

    Attributes:
        weights: Every matrix and stack of matrices, in source order.
        loose: Names of all other tensors, in source order.
        rejects: What cannot be read.
    """

    weights: list[SourceWeight] = field(default_factory=list)
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


def take_inventory(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> Inventory:
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
    groups = _groups(specs, block)
    owned = {name for group in groups.values() for name in group.names.values()}
    for name in specs:
        group = groups.get(name)
        if group is None:
            if name not in owned:
                _loose(name, inventory)
            continue
        found = next((found for detect in (_one_weight, *DETECTORS) if (found := detect(group)) is not None), None)
        if isinstance(found, Reject):
            inventory.rejects.append(found)
        elif found is None and len(group.specs) > 1:
            partners = ", ".join(sorted(set(group.specs) - {"weight"}))
            inventory.rejects.append(
                group.reject(f"is {group.specs['weight'].dtype} with {partners}, which is not read")
            )
        elif found is None:
            inventory.loose.extend(dict.fromkeys(group.names.values()))
        else:
            inventory.weights.append(replace(found, bare=name == found.module))
    return inventory


def _one_weight(group: Group) -> Reject | None:
    """A module with both `weight` and `weight_packed` is not one weight."""
    twice = group.names.get("weight_packed", group.weight) != group.weight
    return group.reject(f"stands beside `{group.names['weight_packed']}`: which one counts?") if twice else None


def _loose(name: str, inventory: Inventory) -> None:
    if name.rpartition(".")[2] in {"weight_scale_inv", "weight_scale"}:
        inventory.rejects.append(Reject(name, "is a scale without its weight", "fetch the checkpoint again"))
    else:
        inventory.loose.append(name)


def _groups(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> dict[str, Group]:
    """Weight name -> group, for every name that is a matrix or a stack of experts."""
    groups: dict[str, Group] = {}
    for name, spec in specs.items():
        module = name.removesuffix("_packed").removesuffix(".weight")
        is_stack = len(spec.shape) == 3 and STACK.match(module)
        if not is_stack and not (len(spec.shape) == 2 and module != name):
            continue
        names = {"weight": name}
        for suffix in SUFFIXES:
            for spelled in (f"{module}.{suffix}", f"{module}_{suffix.removeprefix('weight_')}" if is_stack else ""):
                if spelled in specs:
                    names[suffix] = spelled
        stem, _, projection = module.rpartition(".")
        if (spelled := f"{stem}.{W_NAMES.get(projection)}.input_scale") in specs:
            names.setdefault("input_scale", spelled)
        group_specs = {suffix: specs[spelled] for suffix, spelled in names.items()}
        groups[name] = Group(module, name, group_specs, names, config)
    return groups
