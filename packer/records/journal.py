"""What a run writes down so that a later one can go on where it stopped.

The journal lies in `<output>/.tilewright-partial/` beside the unfinished files. Its first line says what the run is:
the hash of each plan, and size, header and time of the last change of every source shard. Each further line is a
finished shard, or a source shard that is about to be deleted (`--consume`). A line counts once it is complete, and it
is written after the shard is safe on disk; so after a crash at any moment the journal is true, and what it does not
name is made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tilewright
from tilewright.kernels.errors import PlanError
from tilewright.kernels.packed.manifest import FileRecord
from tilewright.kernels.packed.records import (
    RecordError,
    as_array,
    as_integer,
    as_object,
    as_text,
    check_schema,
    parse_json,
)
from tilewright.kernels.packed.records import field as field_of

from .atomic import sync_directory

PARTIAL = ".tilewright-partial"
JOURNAL = "journal"
SCHEMA = 2  # 1 is that of release 0.1, whose plans had other hashes: it cannot be gone on with

Identity = tuple[int, str, int]  # of a source shard: size, sha256 of its header, time of the last change in ns


@dataclass
class JournalState:
    """What a journal says.

    Attributes:
        plans: Output directory, relative to the journal's, -> hash of its plan.
        source: Source shard -> its identity.
        options: Output directory -> the options of its plan, to say what differs; only the hash decides.
        finished: Finished file, relative to the output directory of the run, -> size and sha256.
        consumed: Source shards that were deleted, or were about to be.
    """

    plans: dict[str, str]
    source: dict[str, Identity]
    options: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, FileRecord] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)

    def first_line(self) -> dict[str, Any]:
        """What the journal begins with."""
        source = {name: list(identity) for name, identity in self.source.items()}
        return {"schema": SCHEMA, "tilewright": tilewright.__version__, "plans": self.plans, "source": source} | (
            {"options": self.options} if self.options else {}
        )

    def add(self, line: dict[str, Any]) -> None:
        """Take in a further line.

        Raises:
            RecordError: It is none.
        """
        if "consumed" in line:
            self.consumed.add(as_text(line["consumed"], "`consumed`"))
        else:
            self.finished[as_text(field_of(line, "file"), "`file`")] = FileRecord.from_json(line, "a finished file")

    @staticmethod
    def from_json(line: dict[str, Any]) -> JournalState:
        """Read a first line.

        Raises:
            RecordError: It is none, or of another release.
        """
        plans = as_object(field_of(line, "plans"), "`plans`")
        source = as_object(field_of(line, "source"), "`source`")
        return JournalState(
            {name: as_text(plan, "a plan") for name, plan in plans.items()},
            {name: _identity(value) for name, value in source.items()},
            as_object(line.get("options", {}), "`options`"),
        )


def _identity(value: Any) -> Identity:
    fields = as_array(value, "a source shard")
    if len(fields) != 3:
        raise RecordError(f"a source shard has {len(fields)} fields, 3 are expected")
    return as_integer(fields[0], "a size"), as_text(fields[1], "a header"), as_integer(fields[2], "a time", -(2**63))


def read_journal(output: Path) -> JournalState | None:
    """What the journal in `output` says, None if there is none or if it never began; a torn last line does not count.

    Raises:
        PlanError: It is damaged, or of another release.
    """
    path = output / PARTIAL / JOURNAL
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    state: JournalState | None = None
    try:
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines()):
            record = as_object(parse_json(line), "a line")
            if state is not None:
                state.add(record)
                continue
            if number == 0 and check_schema(record, SCHEMA) < SCHEMA and isinstance(record.get("plan"), str):
                raise PlanError(
                    f"{output}: holds the unfinished output of release 0.1, which this one cannot go on with",
                    hint="finish it with that release (pip install 'tilewright<0.2'), or start anew with --overwrite",
                )
            state = JournalState.from_json(record)
    except RecordError as error:
        raise PlanError(f"{path}: the journal is damaged: {error}", hint="start anew with --overwrite") from error
    return state


class Journal:
    """The journal of a run, open for new lines. The caller holds the lock of the output."""

    def __init__(self, output: Path, state: JournalState) -> None:
        self.folder = output / PARTIAL
        self.state = state
        self._fd = -1

    @staticmethod
    def begin(
        output: Path,
        plans: Mapping[str, str],
        source: Mapping[str, Identity],
        options: Mapping[str, Any] | None = None,
    ) -> Journal:
        """A new journal in place of whatever was there."""
        journal = Journal(output, JournalState(dict(plans), dict(source), dict(options or {})))
        journal._open(os.O_TRUNC)
        journal._append(journal.state.first_line())
        sync_directory(journal.folder)
        return journal

    @staticmethod
    def go_on(output: Path, state: JournalState) -> Journal:
        """The journal that says `state`, without the line that a crash may have torn."""
        journal = Journal(output, state)
        journal._open(0)
        content = os.pread(journal._fd, os.fstat(journal._fd).st_size, 0)
        os.ftruncate(journal._fd, content.rfind(b"\n") + 1)
        return journal

    def _open(self, flags: int) -> None:
        flags |= os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.folder / JOURNAL, flags, 0o644)

    def _append(self, line: dict[str, Any]) -> None:
        view = memoryview(json.dumps(line).encode() + b"\n")
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)

    def record(self, file: str, record: FileRecord) -> None:
        """Write down that `file` lies complete and safe in the journal's folder."""
        self._append({"file": file, "size": record.size, "sha256": record.sha256})
        self.state.finished[file] = record

    def consume(self, file: str) -> None:
        """Write down that the source shard `file` is about to be deleted."""
        if file not in self.state.consumed:
            self._append({"consumed": file})
            self.state.consumed.add(file)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
