"""Tensor names grouped into weights, each read by the first encoding that claims it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.kernels.tensors import Reject, TensorSpec

from ..families import family_of
from ..families.experts import ExpertSpellings
from ..families.sizes import size_conflicts
from ..folding import pattern
from .declared import Declared, Fields, QuantMethod, UnreadConfigError, quantization_config
from .details import NOTHING, Details, WatchedDetails
from .encoding import ACTIVATION_SUFFIXES, Encoding, RotatedDecoder, StoredWeight, TensorGroup
from .encodings import ENCODINGS

WAY_OUT = "dequantize the checkpoint with the tool that wrote it"
CODE_TYPES = (torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32)  # no matrix of values has these
FOREIGN = {  # last part of the name of a tensor -> who writes such tensors beside codes
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "bitsandbytes__nf4": "bitsandbytes",
    "bitsandbytes__fp4": "bitsandbytes",
    "W_q": "HQQ",
    "bitmask": "a sparse compressor of compressed-tensors",
}


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


def detect_weights(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], details: Details = NOTHING) -> Inventory:
    """Group the tensors of a source into weights.

    Args:
        specs: Tensor name -> specification, in source order.
        config: The source's config.json.
        details: What headers do not tell.

    Returns:
        The inventory; each name of `specs` is in exactly one weight, in `loose`, or behind a reject.
    """
    inventory = Inventory()
    declared, method = _declared(quantization_config(config), inventory)
    experts = family_of(config).experts
    known = _Suffixes()
    refused = bool(inventory.rejects)
    modules = _modules(specs, known, experts)
    firsts: dict[str, str] = {}  # name of the codes -> module, where they could be a matrix
    codes = _code_suffixes()
    for module, names in modules.items():
        first = next((names[suffix] for suffix in codes if suffix in names), "")
        if first and len(specs[first].shape) >= 2:
            firsts[first] = module
    owned = {name for module in firsts.values() for name in modules[module].values()}
    kinds: dict[Hashable, _Kind] = {}
    for name in specs:
        if name in firsts:
            module = firsts[name]
            names = modules[module]
            numbers = declared(experts.canonical(module))
            key = (pattern(module), numbers, *names, *[specs[name] for name in names.values()])
            if kind := kinds.get(key):
                inventory.weights.append(kind.weight(module, names))
            else:
                of = {suffix: specs[name] for suffix, name in names.items()}
                watched = WatchedDetails(details.metadata, details.read)
                group = TensorGroup(module, of, names, numbers, method, experts.find_stack(module) is not None, watched)
                weight = _claim(group, inventory, number=len(kinds))
                if weight and weight.kind is not None:
                    kinds[key] = _Kind.of(weight, names)
        elif name not in owned:
            _loose(name, (known.split(name, experts) or ("", ""))[1], inventory, method)
    _compare_sizes(inventory, specs, config)
    if refused:  # what cannot be read without the config follows from that, and need not be told
        del inventory.rejects[1:]
    return inventory


def _compare_sizes(inventory: Inventory, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> None:
    """Refuse weights whose sizes, as their packed codes are read, are not those of the model."""
    matrices = {
        weight.module: weight
        for weight in inventory.weights
        if weight.quantized and len(weight.shape) == 2 and weight.shape != specs[weight.tensors[0]].shape
    }
    shapes = {module: (weight.shape[0], weight.shape[1]) for module, weight in matrices.items()}
    for module, reason in size_conflicts(shapes, config):
        name, encoding = matrices[module].tensors[0], matrices[module].encoding
        hint = "config.json and weights belong to two models, or the weights are not what config.json says"
        inventory.rejects.append(Reject(name, f"read as {encoding} {reason}", hint))


@dataclass(frozen=True)
class _Kind:
    """Weights that differ in nothing but the numbers in their names: a large model has a few dozen kinds of them.

    Attributes:
        first: One of them.
        tensors: Suffixes of its tensors.
        companions: Suffixes of its companions.
    """

    first: StoredWeight
    tensors: tuple[str, ...]
    companions: tuple[str, ...]

    @staticmethod
    def of(weight: StoredWeight, names: Mapping[str, str]) -> _Kind:
        """The kind of a weight whose tensors have these names, by suffix."""
        suffixes = {name: suffix for suffix, name in names.items()}
        return _Kind(
            weight,
            tuple(suffixes[name] for name in weight.tensors),
            tuple(suffixes[name] for name in weight.companions),
        )

    def weight(self, module: str, names: Mapping[str, str]) -> StoredWeight:
        """The weight of another module of this kind."""
        tensors = tuple([names[suffix] for suffix in self.tensors])
        return self.first.like(module, tensors, tuple([names[suffix] for suffix in self.companions]))


def _methods() -> dict[str, QuantMethod]:
    return {method.id: method for encoding in ENCODINGS.values() for method in encoding.methods}


def _declared(block: Mapping[str, Any], inventory: Inventory) -> tuple[Declared, str]:
    """What the quantization config says of each module, and its `quant_method`; refusals go into the inventory."""
    if not block:
        return (lambda _: None), ""
    method, methods = str(block.get("quant_method")), _methods()
    if method not in methods:
        is_packed = method == "tilewright"
        hint = "pack-for-cpu --unpack turns it back" if is_packed else f"known: {', '.join(methods)}"
        what = "already packed" if is_packed else f"quantized by `{method}`, which is not read"
        inventory.rejects.append(Reject("config.json", f"the source is {what}", hint))
        return (lambda _: None), method
    try:
        return methods[method].read(Fields(block)), method
    except UnreadConfigError as error:
        inventory.rejects.append(error.reject)
        return (lambda _: None), method


def _claim(group: TensorGroup, inventory: Inventory, number: int) -> StoredWeight | None:
    """Add the weight that a group is, or what else becomes of its tensors.

    Args:
        group: The tensors of a module.
        inventory: Gets them.
        number: Of the kind of weights that it is, if it is the first of them.

    Returns:
        The weight, if it is one. It stands for all modules whose tensors are alike, unless one of its tensors has
        another fate or was read to know what it is; then it is of no kind.
    """
    first, *further = [suffix for suffix in _code_suffixes() if suffix in group.names]
    if further:
        names = group.names
        inventory.rejects.append(Reject(names[first], f"stands beside `{names[further[0]]}`: which one counts?"))
        return None
    found: StoredWeight | Reject | None = None
    for encoding in ENCODINGS.values():
        if found := encoding.detect(group):
            found = _rotated(_unknown_partner(found, group, encoding) or found, group)
            break
    if isinstance(found, Reject):
        inventory.rejects.append(found)
    elif found is not None:
        loose = [name for name in group.names.values() if name not in (*found.tensors, *found.companions)]
        inventory.loose.extend(loose)
        shared = tuple(group.specs[suffix].shape[:1] == found.shape[:1] for suffix in _suffixes_of(found, group))
        is_bare = group.names.get("weight") == group.module
        is_alone = bool(loose) or group.details.was_asked
        weight = replace(found, bare=is_bare, per_expert=shared, kind=None if is_alone else number)
        inventory.weights.append(weight)
        return weight
    elif first == "weight" and group.is_matrix() and group.specs[first].dtype in CODE_TYPES and len(group.specs) == 1:
        kind = str(group.specs[first].dtype).removeprefix("torch.")
        inventory.rejects.append(
            group.reject(f"is {kind}: it looks like codes of an encoding that is not read", WAY_OUT)
        )
    elif len(group.specs) > 1:
        partners = ", ".join(sorted(set(group.specs) - {first}))
        reason = f"is {group.specs[first].dtype} with {partners}, which is not read"
        inventory.rejects.append(group.reject(reason, suffix=first))
    else:
        inventory.loose.extend(group.names.values())
    return None


def _rotated(found: StoredWeight | Reject, group: TensorGroup) -> StoredWeight | Reject:
    """The weight, with the rotation that the config says it was quantized under."""
    rotations = group.declared.rotations if group.declared else ()
    if not rotations or isinstance(found, Reject):
        return found
    rotation = rotations[0]
    if len(rotations) > 1 or not found.quantized:
        what = "has more than one rotation" if len(rotations) > 1 else f"is {found.encoding} and rotated by {rotation}"
        return group.reject(f"{what} by `transform_config`, which is not read", WAY_OUT, suffix=_first(found, group))
    if found.shape[-1] % rotation.block:
        return group.reject(f"has {found.shape[-1]} columns, which its rotation {rotation} does not divide")
    encoding = f"{found.encoding}, input rotated by {rotation}"
    return replace(found, encoding=encoding, decoder=RotatedDecoder(found.decoder, rotation), rotation=rotation)


def _first(found: StoredWeight, group: TensorGroup) -> str:
    return _suffixes_of(found, group)[0]


def _unknown_partner(found: StoredWeight | Reject, group: TensorGroup, encoding: Encoding) -> Reject | None:
    """A refusal of a quantized weight beside tensors that its encoding does not know; they may change its values."""
    if isinstance(found, Reject) or not found.quantized:
        return None
    known = {*encoding.suffixes, *ACTIVATION_SUFFIXES}
    strangers = [name for suffix, name in group.names.items() if suffix not in known]
    reason = f"is {found.encoding}, and `{', '.join(strangers)}` beside it is not known to belong to that"
    return Reject(found.tensors[0], reason) if strangers else None


def _suffixes_of(weight: StoredWeight, group: TensorGroup) -> list[str]:
    suffixes = {name: suffix for suffix, name in group.names.items()}
    return [suffixes[name] for name in weight.tensors]


def _code_suffixes() -> list[str]:
    """Suffixes of the tensors that hold codes or values, in any encoding."""
    return list(dict.fromkeys(encoding.suffixes[0] for encoding in ENCODINGS.values()))


def _loose(name: str, suffix: str, inventory: Inventory, method: str) -> None:
    """Add a tensor that belongs to no weight; in a quantized source, none may be what encodings have beside codes."""
    if suffix in {"weight_scale_inv", "weight_scale"}:
        inventory.rejects.append(Reject(name, "is a scale without its weight", "fetch the checkpoint again"))
    elif method and suffix and suffix not in {"weight", *ACTIVATION_SUFFIXES}:
        reason = "belongs to a quantized weight, but what else belongs to it is missing or has another shape"
        inventory.rejects.append(Reject(name, reason, "fetch the checkpoint again"))
    elif tool := FOREIGN.get(name.rpartition(".")[2]):
        inventory.rejects.append(Reject(name, f"belongs to weights that {tool} quantized, which are not read", WAY_OUT))
    else:
        inventory.loose.append(name)


class _Suffixes:
    """Suffix -> its place, of every tensor that an encoding knows."""

    def __init__(self) -> None:
        suffixes = (suffix for encoding in ENCODINGS.values() for suffix in encoding.suffixes)
        self.places = {s: place for place, s in enumerate(dict.fromkeys((*suffixes, *ACTIVATION_SUFFIXES)))}
        self._ends = {suffix.rpartition(".")[2] for suffix in self.places if "." in suffix}

    def split(self, name: str, experts: ExpertSpellings) -> tuple[str, str] | None:
        """Module path and suffix; what lies beside a stack, which has no `.weight`, begins with the stack's name."""
        module, dot, suffix = name.rpartition(".")
        if dot and suffix in self.places and suffix not in self._ends:
            return module, suffix
        parts = name.split(".")
        for count in range(min(3, len(parts) - 1), 0, -1):
            if (suffix := ".".join(parts[-count:])) in self.places:
                return ".".join(parts[:-count]), suffix
        if experts.find_stack(name):
            return name, "weight"
        if beside := experts.split_stack(name):
            stack, rest = beside
            return next(((stack, suffix) for suffix in (rest, f"weight_{rest}") if suffix in self.places), None)
        return None


def _modules(specs: Mapping[str, TensorSpec], known: _Suffixes, experts: ExpertSpellings) -> dict[str, dict[str, str]]:
    """Module path -> suffix -> name, sorted by suffix, of all tensors that an encoding may know."""
    modules: dict[str, dict[str, str]] = {}
    for name in specs:
        if found := known.split(name, experts):
            modules.setdefault(found[0], {})[found[1]] = name
    for module, names in modules.items():
        if (spelled := f"{experts.short(module)}.input_scale") in specs:
            names.setdefault("input_scale", spelled)
        order = sorted(names, key=known.places.__getitem__)
        if order != list(names):
            modules[module] = {suffix: names[suffix] for suffix in order}
    return modules
