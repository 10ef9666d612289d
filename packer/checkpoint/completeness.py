"""A source compared with its config: layers, experts and projections that should be there and are not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilewright.kernels.tensors import Reject

from ..families.config import LAYERS, VALUES_ARE_KEYS, expert_count, text_config
from ..families.family import ModelFamily
from ..families.parallel import TOGETHER
from ..families.roles import unwrapped
from .files import Checkpoint

HINT = "the checkpoint is not whole: fetch it again, or correct config.json"
SHOWN = 6
_LAYER = re.compile(r"^(?:\w+\.)*?(?:layers|h|blocks|layer)\.(\d+)\.")


def incomplete(checkpoint: Checkpoint, family: ModelFamily) -> list[Reject]:
    """Why a source is not all of the model that its config.json describes.

    Nothing is compared with a config that does not say how many layers there are.
    """
    paths = dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.files)
    modules = [path for path in paths if family.role(path) != "vision"]
    config = text_config(checkpoint.config)
    if type(config.get(LAYERS)) is not int:
        return []
    missing = [*_layers(modules, config)]
    if missing:
        return missing
    return [*_experts(modules, config, family), *([] if config.get(VALUES_ARE_KEYS) else _projections(modules, family))]


def _layers(modules: Iterable[str], config: Mapping[str, Any]) -> Iterator[Reject]:
    """Layers that config.json counts and no tensor belongs to."""
    count = int(config[LAYERS])
    found = {int(layer[1]) for module in modules if (layer := _LAYER.match(unwrapped(module) + "."))}
    if not found:
        return
    missing = [number for number in range(min(count, 1 << 16)) if number not in found]
    if missing:
        there = f"{min(count, len(found))} of the {count} layers"
        yield Reject("config.json", f"{LAYERS} = {count}, but there are {there}; not {_listed(missing)}", HINT)


def _experts(modules: Iterable[str], config: Mapping[str, Any], family: ModelFamily) -> Iterator[Reject]:
    """Experts that config.json counts and that a layer does not hold, or holds without one of their matrices."""
    count = expert_count(config)
    layers: dict[str, dict[int, set[str]]] = {}
    for module in modules:
        if (path := family.experts.find(family.experts.canonical(module))) and path.number is not None:
            layers.setdefault(path.container, {}).setdefault(path.number, set()).add(path.name)
    for container, experts in layers.items():
        if missing := [number for number in range(count) if number not in experts]:
            yield Reject(container, f"lacks {len(missing)} of {count} experts: {_listed(missing)}", HINT)
        kinds = set().union(*experts.values())
        for number, names in experts.items():
            if number < (count or number + 1) and names != kinds:
                yield Reject(f"{container}.{number}", f"has no {_listed(sorted(kinds - names))}, others have", HINT)


def _projections(modules: Iterable[str], family: ModelFamily) -> Iterator[Reject]:
    """Linears that are of use only together, of which some are missing: keys without values, a gate without its up."""
    paths: dict[str, set[str]] = {}
    for module in modules:
        path, _, name = module.rpartition(".")
        paths.setdefault(path, set()).add(name)
    for path, names in paths.items():
        for needs, wanted in TOGETHER:
            if needs <= names and not wanted <= names and not family.experts.find(f"{path}.{next(iter(needs))}"):
                yield Reject(path, f"has {_listed(sorted(needs))}, but no {_listed(sorted(wanted - names))}", HINT)
                break


def _listed(items: Iterable[object]) -> str:
    names = [str(item) for item in items]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
