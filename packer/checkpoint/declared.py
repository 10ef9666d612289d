"""What a source's config says about the numbers of its weights: each key is accounted for, or the source refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.kernels.errors import quoted
from tilewright.kernels.rotation import Rotation
from tilewright.kernels.tensors import Reject

MLX_KEY = "quantization"  # where MLX says how weights are stored; newer versions repeat it where others say it


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization block of a config.json, also where an older tool nested it."""
    of_mlx = config.get(MLX_KEY)
    for holder in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), Mapping):
                found: Mapping[str, Any] = holder[key]
                return found if "quant_method" in found or found != of_mlx else {"quant_method": "mlx", **found}
    return {"quant_method": "mlx", **of_mlx} if isinstance(of_mlx, Mapping) and "bits" in of_mlx else {}


class UnreadConfigError(Exception):
    """A quantization config says something that no reader understands.

    Attributes:
        reject: What, for people.
    """

    def __init__(self, key: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{key}: {reason}")
        self.reject = Reject("config.json", f"`{key}` {reason}", hint)


class Fields:
    """A JSON object of a config whose keys are taken one by one; `close` refuses what is left.

    Args:
        block: The object.
        path: Where it stands, for messages: `quantization_config.config_groups.group_0`.
    """

    def __init__(self, block: Mapping[str, Any], path: str = "quantization_config") -> None:
        self._left = dict(block)
        self._path = path

    def name(self, key: str) -> str:
        """The full name of a key."""
        return f"{self._path}.{key}"

    def fail(self, key: str, reason: str, hint: str | None = None) -> UnreadConfigError:
        """An error about a key."""
        return UnreadConfigError(self.name(key), reason, hint)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, `default` if it is absent; it counts as read."""
        return self._left.pop(key, default)

    def choose(self, key: str, known: Sequence[Any], default: Any = None) -> Any:
        """A value that must be one of `known`; null and absence mean `default`."""
        value = self.take(key)
        if value is None:
            return default
        if not any(value == option and type(value) is type(option) for option in known):
            listed = ", ".join(map(str, known))
            raise self.fail(key, f"is {quoted(str(value))}, which is not read; known: {listed}")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """An integer; null and absence mean `default`, where there is one."""
        value = self.take(key, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(key, f"is {quoted(str(value))}, an integer is expected")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.choose(key, (True, False), default)
        return bool(value)

    def names(self, key: str) -> list[str]:
        """A list of texts, of which those after `re:` are regexes; empty if it is absent or null."""
        value = self.take(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "is no list of names")
        for regex in (item[3:] for item in value if item.startswith("re:")):
            try:
                re.compile(regex)
            except (re.error, OverflowError, RecursionError) as error:
                raise self.fail(key, f"holds {quoted(regex)}, which is no regex: {error}") from None
        return value

    def inner(self, key: str) -> Fields | None:
        """An object below this one; None if it is absent or null."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, f"is {quoted(str(value))}, an object is expected")
        return Fields(value, self.name(key))

    def absent(self, *keys: str) -> None:
        """Keys that change what the numbers mean, and are read only where they are absent, null, false or empty."""
        for key in keys:
            if value := self.take(key):
                raise self.fail(key, f"is {quoted(str(value))}, which is not read")

    def skip(self, *keys: str) -> None:
        """Keys that say nothing about stored weights, whatever their value: how they were made, how they are run."""
        for key in keys:
            self.take(key)

    def close(self) -> None:
        """Refuse keys that nothing has taken.

        Raises:
            UnreadConfigError: There are some.
        """
        if self._left:
            names = ", ".join(self._left)
            raise self.fail(
                next(iter(self._left)),
                f"is a key that the reader of this format does not know (of {names})",
                "a key can change what the numbers mean; dequantize the source with the tool that wrote it",
            )

    def remaining(self) -> list[str]:
        """Keys that are not taken yet."""
        return list(self._left)


@dataclass(frozen=True)
class DeclaredNumbers:
    """What a config says about the weight of one module.

    Attributes:
        kind: "int", "float" (FP8, FP4), or the name of another code table such as "nf4".
        bits: Bits of a code; 0 where the config leaves it to the tensors.
        block: Rows and columns that share a scale, 0 for all of them; None where the tensors tell.
        symmetric: No zero points.
        by_activation: Columns were grouped in the order of activations (`g_idx`, `weight_g_idx`).
        packing: How codes lie, in the words of the format: "pack-quantized", "gptq_v2", "gemm".
        scale_dtype: Stated type of the scales; empty where it is not stated.
        rotations: What its columns were multiplied by before they were quantized.
    """

    kind: str
    bits: int = 0
    block: tuple[int, int] | None = None
    symmetric: bool = True
    by_activation: bool = False
    packing: str = ""
    scale_dtype: str = ""
    rotations: tuple[Rotation, ...] = ()


Declared = Callable[[str], DeclaredNumbers | None]


class QuantMethod(Protocol):
    """One `quant_method` of a config."""

    @property
    def id(self) -> str:
        """The value of `quant_method`."""

    def read(self, fields: Fields) -> Declared:
        """Module path -> what is declared of its weight; None for modules that are not quantized.

        Raises:
            UnreadConfigError: A key, or a value, is not understood.
        """


def everywhere(numbers: DeclaredNumbers, unquantized: Sequence[str] = ()) -> Declared:
    """The same numbers for all modules but those of a list."""
    unlisted = Listed(unquantized)
    return lambda module: None if module in unlisted else numbers


class Listed:
    """The modules that a list means: by their path, its end, whole parts of it, or by `re:` and a regex.

    Lists name hundreds of modules and are asked about tens of thousands, so paths are looked up and not compared.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._regexes = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
        paths = [entry.strip(".") for entry in entries if not entry.startswith("re:")]
        self._paths = frozenset(paths)
        self._lengths = sorted({path.count(".") + 1 for path in paths})

    def __contains__(self, module: str) -> bool:
        """Whether the list means this module."""
        if any(regex.match(module) for regex in self._regexes):
            return True
        if not self._paths:
            return False
        parts = module.split(".")
        return any(
            ".".join(parts[start : start + length]) in self._paths
            for length in self._lengths
            for start in range(len(parts) - length + 1)
        )
