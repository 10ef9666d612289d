"""What became of every source tensor, and why: `ledger.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.errors import quoted
from tilewright.kernels.packed.records import (
    as_integers,
    as_object,
    as_text,
    as_texts,
    check_schema,
    field,
    read_record,
)

LEDGER_FILE = "ledger.json"
SCHEMA = 2  # 1, of release 0.1, is the same without the version
HINT = "it was written by Tilewright; restore it, or remove it and do without its reasons"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What became of one source tensor.

    Attributes:
        fate: `quantized`, `dequantized`, `packed`, `copied` or `dropped`.
        reason: Why, for people.
        dtype: In the source, as safetensors spells it.
        shape: In the source.
        outputs: Names of the output tensors that it feeds.
    """

    fate: str
    reason: str
    dtype: str
    shape: tuple[int, ...]
    outputs: tuple[str, ...]

    @staticmethod
    def from_json(value: Any, name: str) -> LedgerEntry:
        """Read one entry.

        Raises:
            RecordError: A field is missing or of a wrong type.
        """
        what = f"tensor {quoted(name)}"
        fields = as_object(value, what)
        return LedgerEntry(
            as_text(field(fields, "fate", what), f"`fate` of {what}"),
            as_text(field(fields, "reason", what), f"`reason` of {what}"),
            as_text(field(fields, "dtype", what), f"`dtype` of {what}"),
            as_integers(field(fields, "shape", what), f"`shape` of {what}"),
            as_texts(field(fields, "outputs", what), f"`outputs` of {what}"),
        )


@dataclass(frozen=True)
class Ledger:
    """One fate for each source tensor, and what was noticed.

    Attributes:
        notes: For people.
        tensors: Source name -> its fate.
    """

    notes: tuple[str, ...]
    tensors: Mapping[str, LedgerEntry]

    def to_json(self) -> bytes:
        """The content of `ledger.json`, sorted by name."""
        tensors = {
            name: {
                "fate": entry.fate,
                "reason": entry.reason,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "outputs": list(entry.outputs),
            }
            for name, entry in sorted(self.tensors.items())
        }
        document = {"schema": SCHEMA, "notes": list(self.notes), "tensors": tensors}
        return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_json(record: dict[str, Any]) -> Ledger:
        """The inverse of `to_json`.

        Raises:
            RecordError: A field is missing or of a wrong type, or a newer release wrote it.
        """
        check_schema(record, SCHEMA)
        tensors = as_object(field(record, "tensors"), "`tensors`")
        notes = as_texts(field(record, "notes"), "`notes`")
        return Ledger(notes, {name: LedgerEntry.from_json(entry, name) for name, entry in tensors.items()})


def read_ledger(root: Path) -> Ledger | None:
    """The ledger of a directory, None if it has none.

    Raises:
        CheckpointError: There is one that cannot be read.
    """
    return read_record(root / LEDGER_FILE, lambda record: Ledger.from_json(as_object(record, "it")), hint=HINT)
