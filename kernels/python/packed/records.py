"""Read what a JSON record says, or say in one sentence what is wrong with it.

Every record that Tilewright reads (manifest, ledger, journal, module metadata, index, config.json) comes from a disk or
a network, so anything may stand in it. `parse_json` and the typed accessors below raise `RecordError` and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError, quoted

T = TypeVar("T")
MAX_DEPTH = 64  # of nested arrays and objects: far more than any record has, far less than what exhausts a stack
MAX_INTEGER = 2**63 - 1


class RecordError(ValueError):
    """A record does not say what it must; the message follows the name of the record."""


def parse_json(content: bytes | str, *, constants: bool = False) -> Any:
    """The value of a JSON document.

    Args:
        content: UTF-8 or text.
        constants: Accept `Infinity` and `NaN`, which are no JSON but stand in the configs of some models.

    Raises:
        RecordError: It is not JSON in UTF-8, is nested too deeply, or holds half of a surrogate pair, a number that is
            no finite one, or an integer of thousands of digits.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text) if constants else json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise RecordError(f"is nested more than {MAX_DEPTH} levels deep") from None
    except RecordError:
        raise
    except UnicodeDecodeError as error:
        raise RecordError(f"is not UTF-8: byte {error.start} is {content[error.start]!r}") from None
    except ValueError as error:
        raise RecordError(f"is not valid JSON: {quoted(str(error))}") from None
    _check_tree(value, strings="\\ud" in text.lower())
    return value


def _refuse(constant: str) -> None:
    raise RecordError(f"holds the number {constant}; only finite numbers are allowed")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RecordError(f"holds the number {quoted(text)}; only finite numbers are allowed")
    return value


def _check_tree(value: Any, strings: bool) -> None:
    """Check depth, and strings if some may hold half of a surrogate pair, without recursion."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise RecordError(f"is nested more than {MAX_DEPTH} levels deep")
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.values()
                if strings:
                    deeper += item.keys()
            elif isinstance(item, list):
                deeper += item
            elif strings and isinstance(item, str):
                _check_text(item)
        level, depth = deeper, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecordError(f"holds {quoted(text)}, half of a surrogate pair, which is no text") from None


def read_json(path: Path, *, constants: bool = False, hint: str | None = None) -> Any:
    """The value of the JSON file `path`; see `parse_json`.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It cannot be read, or is no JSON.
    """
    try:
        if not path.is_file() and path.exists():
            raise CheckpointError(f"{path}: is no file", hint=hint)  # opening a pipe would wait for ever
        return parse_json(path.read_bytes(), constants=constants)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", hint=hint) from error
    except RecordError as error:
        raise CheckpointError(f"{path}: {error}", hint=hint) from error


def read_object(path: Path, *, constants: bool = False, hint: str | None = None) -> dict[str, Any]:
    """The JSON object in the file `path`; see `read_json`."""
    value = read_json(path, constants=constants, hint=hint)
    try:
        return as_object(value, "it")
    except RecordError as error:
        raise CheckpointError(f"{path}: {error}", hint=hint) from error


def read_record(path: Path, parse: Callable[[Any], T], *, hint: str) -> T | None:
    """What `parse` makes of the JSON file `path`; None without such a file.

    Raises:
        CheckpointError: It cannot be read, is no JSON, or `parse` raises a `RecordError`.
    """
    try:
        return parse(read_json(path, hint=hint))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RecordError as error:
        raise CheckpointError(f"{path}: {error}", hint=hint) from error


def as_object(value: Any, what: str) -> dict[str, Any]:
    """`value` if it is a JSON object; `what` names it in the message."""
    if not isinstance(value, dict):
        raise RecordError(f"{what} is {_kind(value)}, a JSON object is expected")
    return value


def as_array(value: Any, what: str) -> list[Any]:
    """`value` if it is a JSON array."""
    if not isinstance(value, list):
        raise RecordError(f"{what} is {_kind(value)}, a JSON array is expected")
    return value


def as_text(value: Any, what: str) -> str:
    """`value` if it is a string."""
    if not isinstance(value, str):
        raise RecordError(f"{what} is {_kind(value)}, a string is expected")
    return value


def as_integer(value: Any, what: str, least: int = 0, most: int = MAX_INTEGER) -> int:
    """`value` if it is an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise RecordError(f"{what} is {quoted(str(value), 60)}, an integer from {least} to {most} is expected")
    return value


def as_texts(value: Any, what: str) -> tuple[str, ...]:
    """`value` if it is an array of strings."""
    return tuple(as_text(item, f"an element of {what}") for item in as_array(value, what))


def as_integers(value: Any, what: str, least: int = 0, most: int = MAX_INTEGER) -> tuple[int, ...]:
    """`value` if it is an array of integers."""
    return tuple(as_integer(item, f"an element of {what}", least, most) for item in as_array(value, what))


def field(record: dict[str, Any], name: str, what: str = "") -> Any:
    """The field `name`, which must be there; `what` names an object inside a record."""
    if name not in record:
        raise RecordError(f"{what} has no `{name}`".lstrip())
    return record[name]


def check_schema(record: dict[str, Any], newest: int) -> int:
    """The schema version of a record, 1 where none is stated.

    Raises:
        RecordError: It is newer than this release knows.
    """
    version = as_integer(record.get("schema", 1), "`schema`", 1)
    if version > newest:
        raise RecordError(f"has schema version {version}, this release reads up to {newest}; use a newer release")
    return version


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "an array"}.get(
        type(value), "an object"
    )
