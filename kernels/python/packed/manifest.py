"""The manifest of a directory that Tilewright wrote, and whether a file is still what it says."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import quoted
from .records import RecordError, as_integer, as_object, as_text, check_schema, field, read_record

MANIFEST_FILE = "manifest.json"
SCHEMA = 2  # 1, of release 0.1, is the same without the version
HINT = "it was written by Tilewright; restore it, or remove it if the directory is of another tool"


@dataclass(frozen=True)
class FileRecord:
    """A finished file: size in bytes and sha256 in hexadecimal."""

    size: int
    sha256: str

    @staticmethod
    def from_json(value: Any, what: str) -> FileRecord:
        """Read the object with `size` and `sha256` that `what` names.

        Raises:
            RecordError: It is no such object.
        """
        fields = as_object(value, what)
        digest = as_text(field(fields, "sha256", what), f"`sha256` of {what}")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise RecordError(f"`sha256` of {what} is not 64 hexadecimal digits")
        return FileRecord(as_integer(field(fields, "size", what), f"`size` of {what}"), digest)


@dataclass(frozen=True)
class Manifest:
    """What marks an output as complete.

    Attributes:
        tool: Version of the release that wrote it.
        plan: sha256 of the plan.
        options: Every option that could change a byte.
        layouts: Packed layouts in it, id -> version.
        files: Path below the directory -> size and sha256.
    """

    tool: str
    plan: str
    options: Mapping[str, Any]
    layouts: Mapping[str, int]
    files: Mapping[str, FileRecord]

    def to_json(self) -> bytes:
        """The content of `manifest.json`."""
        document = {
            "schema": SCHEMA,
            "tilewright": self.tool,
            "plan": self.plan,
            "options": self.options,
            "layouts": dict(sorted(self.layouts.items())),
            "files": {name: {"size": one.size, "sha256": one.sha256} for name, one in sorted(self.files.items())},
        }
        return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_json(record: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`.

        Raises:
            RecordError: A field is missing or of a wrong type, or a newer release wrote it.
        """
        check_schema(record, SCHEMA)
        layouts = as_object(field(record, "layouts"), "`layouts`")
        files = as_object(field(record, "files"), "`files`")
        return Manifest(
            as_text(field(record, "tilewright"), "`tilewright`"),
            as_text(field(record, "plan"), "`plan`"),
            as_object(field(record, "options"), "`options`"),
            {name: as_integer(version, f"the version of layout {quoted(name)}") for name, version in layouts.items()},
            {name: FileRecord.from_json(one, f"file {quoted(name)}") for name, one in files.items()},
        )


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of a directory, None for one that Tilewright did not finish.

    Raises:
        CheckpointError: There is one that cannot be read.
    """

    def parse(record: Any) -> Manifest | None:
        return Manifest.from_json(record) if isinstance(record, dict) and "tilewright" in record else None

    return read_record(root / MANIFEST_FILE, parse, hint=HINT)


def difference(path: Path, stated: FileRecord, *, checksum: bool = True) -> str | None:
    """How a file differs from what the manifest says of it, or None if it does not.

    Args:
        path: The file.
        stated: Its size and SHA-256.
        checksum: Read the file and compare its SHA-256 too.
    """
    try:
        if (found := path.stat().st_size) != stated.size:
            return f"has {found} bytes, {MANIFEST_FILE} says {stated.size}"
        if not checksum:
            return None
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if actual == stated.sha256 else f"has SHA-256 {actual}, {MANIFEST_FILE} says {stated.sha256}"
