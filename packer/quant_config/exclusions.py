"""What serving engines make of the list of unquantized modules in a config.json, and where that differs from the files.

Each engine spells and matches the list in its own way; the rules below are those of SGLang 0.5, vLLM 0.33, transformers
5.24 and TensorRT-LLM, for the methods that each of them reads.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.kernels.tensors import TensorSpec

from ..checkpoint import detect_weights, quantization_config
from ..families import family_of
from ..families.experts import LONG
from ..families.roles import Role, unwrapped

Matcher = Callable[[list[str], str], bool]
AUTOMATIC: tuple[Role, ...] = ("embedding", "head", "router", "shared-gate", "norm", "mtp-projection", "conv")


def _components(entries: list[str], path: str) -> bool:
    """SGLang: an entry is the path, or whole parts at its beginning, middle or end, with or without `model.`."""
    both = {*entries, *(f"model.{entry}" for entry in entries), *(entry.removeprefix("model.") for entry in entries)}
    return any(f".{entry}." in f".{path}." for entry in both)


def _exact(entries: list[str], path: str) -> bool:
    """vLLM: the full path; for the experts of a layer, any entry about experts that contains it."""
    if path.endswith(f".{LONG.container}"):
        return any(LONG.container in entry and path in entry for entry in entries)
    return path in entries


def _exact_or_regex(entries: list[str], path: str) -> bool:
    """compressed-tensors: the full path, or `re:` matched from the beginning."""
    return any(
        re.match(entry.removeprefix("re:"), path) is not None if entry.startswith("re:") else entry == path
        for entry in entries
    )


def _suffix_or_regex(entries: list[str], path: str) -> bool:
    """SGLang's w8a8_int8: as compressed-tensors, or a tail of the path."""
    tails = [entry for entry in entries if not entry.startswith("re:")]
    return _exact_or_regex(entries, path) or any(path.endswith(f".{entry}") for entry in tails)


def _anchored_or_tail(entries: list[str], path: str) -> bool:
    """transformers: a regex from the beginning that ends where a part ends, or a plain end of the path."""
    return any(re.match(rf"(?:{entry})(?:\.|$)", path) or path.endswith(entry) for entry in map(_safe, entries))


def _safe(entry: str) -> str:
    """A list entry as a regex; one that is none stands for itself."""
    try:
        re.compile(entry)
    except re.error:
        return re.escape(entry)
    return entry


def _glob(entries: list[str], path: str) -> bool:
    """TensorRT-LLM: globs over the full path."""
    return any(fnmatch.fnmatchcase(path, entry) for entry in entries)


def _nothing(entries: list[str], path: str) -> bool:
    """A method without a list."""
    return False


@dataclass(frozen=True)
class Reading:
    """How one engine reads the list of one quantization method.

    Attributes:
        keys: Keys of the config block; the first one with entries counts, or all of them if `merged`.
        matches: (entries, module path) -> whether the module is left in 16 bits.
        merged: All keys count.
    """

    keys: tuple[str, ...]
    matches: Matcher
    merged: bool = False

    def entries(self, block: Mapping[str, Any]) -> list[str]:
        """The list that the engine sees."""
        lists = [list(block.get(key) or []) for key in self.keys]
        return sum(lists, []) if self.merged else next((entries for entries in lists if entries), [])


FP8_KEYS = ("ignored_layers", "modules_to_not_convert")
ENGINES: dict[str, dict[str, Reading]] = {
    "SGLang": {
        "fp8": Reading(FP8_KEYS, _components),
        "w8a8_int8": Reading(("ignore",), _suffix_or_regex),
        "w4afp8": Reading((), _nothing),
        "compressed-tensors": Reading(("ignore",), _exact_or_regex),
    },
    "vLLM": {"fp8": Reading(FP8_KEYS, _exact), "compressed-tensors": Reading(("ignore",), _exact_or_regex)},
    "transformers": {
        "fp8": Reading(("modules_to_not_convert", "ignored_layers"), _anchored_or_tail),
        "compressed-tensors": Reading(("ignore",), _exact_or_regex),
    },
    "TensorRT-LLM": {"fp8": Reading(("ignore", *FP8_KEYS), _glob, merged=True), "w4afp8": Reading((), _nothing)},
}
_LISTS = {key for readings in ENGINES.values() for reading in readings.values() for key in reading.keys}


@dataclass(frozen=True)
class View:
    """What one engine derives.

    Attributes:
        engine: Its name.
        reads: Whether it reads this quantization method at all.
        excluded: Modules that it leaves in 16 bits because of the list.
        missing: Modules that the files hold in 16 bits and the engine takes for quantized ones.
        surplus: Modules that the files hold quantized and the engine takes for 16-bit ones.
        torn: Modules that a text-only load, which knows a shorter path, would judge differently.
    """

    engine: str
    reads: bool
    excluded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    surplus: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()


def engine_views(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> list[View]:
    """The view of every engine.

    Args:
        specs: Tensor name -> specification.
        config: config.json.
    """
    block = quantization_config(config)
    method = str(block.get("quant_method"))
    modules = _modules(specs, config)
    return [
        _view(engine, readings[method], block, modules) if method in readings else View(engine, False)
        for engine, readings in ENGINES.items()
    ]


def unquantized_paths(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> list[str]:
    """The list that every engine reads rightly: full paths of the modules that the files hold in 16 bits.

    A module of a wrapped text model stands under both of its paths; experts of which none is quantized stand one by
    one and as the container that engines ask for.
    """
    modules = _modules(specs, config)
    quantized = {asked for _, is_quantized, asked in modules.values() if is_quantized}
    listed: dict[str, None] = {}
    for path, (_, is_quantized, asked) in modules.items():
        if not is_quantized:
            listed |= dict.fromkeys((path, unwrapped(path)))
            listed |= {} if asked in quantized else dict.fromkeys((asked, unwrapped(asked)))
    return list(listed)


def _modules(specs: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> dict[str, tuple[Role, bool, str]]:
    """Module -> its role, whether the files hold it quantized, and the path that engines ask for: of all experts."""
    # What the files hold is asked without the lists that are judged by it.
    block = {key: value for key, value in quantization_config(config).items() if key not in _LISTS}
    inventory = detect_weights(specs, {**config, "quantization_config": block})
    family = family_of(config)
    modules: dict[str, tuple[Role, bool, str]] = {}
    for weight in inventory.weights:
        path = family.experts.canonical(weight.module)
        container = family.experts.container(path)
        role: Role = "expert" if container else family.role(path)
        modules[path] = role, weight.quantized, container or path
    return modules


def _view(engine: str, reading: Reading, block: Mapping[str, Any], modules: dict[str, tuple[Role, bool, str]]) -> View:
    entries = reading.entries(block)
    cache: dict[str, bool] = {}

    def leaves(asked: str) -> bool:
        if asked not in cache:
            cache[asked] = reading.matches(entries, asked)
        return cache[asked]

    excluded, missing, surplus, torn = [], [], [], []
    for path, (role, quantized, asked) in modules.items():
        left = leaves(asked)
        if left:
            excluded.append(path)
        if left and quantized:
            surplus.append(path)
        elif not left and not quantized and role not in AUTOMATIC:
            missing.append(path)
        if left != leaves(unwrapped(asked)) and role not in AUTOMATIC:
            torn.append(path)
    return View(engine, True, tuple(excluded), tuple(missing), tuple(surplus), tuple(torn))


def described(views: list[View]) -> str:
    """For people: one paragraph per engine."""
    lines = []
    for view in views:
        if not view.reads:
            lines.append(f"{view.engine}: does not read this quantization method")
            continue
        lines.append(f"{view.engine}: leaves {len(view.excluded)} modules of the list in 16 bits")
        differences = {
            "in 16 bits on disk, taken for quantized": view.missing,
            "quantized on disk, taken for 16 bits": view.surplus,
            "judged differently under the path of a text-only load": view.torn,
        }
        lines += [f"  {text}: {_some(paths)}" for text, paths in differences.items() if paths]
        if not any(differences.values()):
            lines.append("  agrees with the files")
    return "\n".join(lines)


def _some(paths: tuple[str, ...]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
