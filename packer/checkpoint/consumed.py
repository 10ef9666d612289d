"""What is kept of a source shard that `--consume` deletes: its header, so that the source can still be planned from."""

from __future__ import annotations

import json
from pathlib import Path

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.records import RecordError, as_integer, as_text, check_schema, field, read_object
from tilewright.kernels.packed.safetensors_file import FileStamp, Header, parse_header

from ..records.atomic import atomic_write

CONSUMED = ".tilewright-consumed"  # folder in the source
SCHEMA = 1


def keep_header(root: Path, file: str, header: Header) -> None:
    """Write down the header of the shard `file` of the source `root`, before the shard is deleted."""
    with header.path.open("rb") as source:
        raw = source.read(header.data_start)[8:]
    record = {"schema": SCHEMA, "size": header.size, "mtime_ns": header.stamp.mtime_ns, "header": raw.decode()}
    folder = root / CONSUMED
    folder.mkdir(0o700, exist_ok=True)
    atomic_write(folder / f"{file}.json", json.dumps(record).encode(), folder / "unfinished")


def kept_files(root: Path) -> list[str]:
    """Names of the shards whose headers are kept in the source `root`."""
    folder = root / CONSUMED
    return sorted(path.relative_to(folder).as_posix().removesuffix(".json") for path in folder.rglob("*.json"))


def read_kept(root: Path, file: str) -> Header:
    """The header of a shard that was deleted.

    Raises:
        CheckpointError: It cannot be read.
    """
    path = root / CONSUMED / f"{file}.json"
    try:
        record = read_object(path)
        check_schema(record, SCHEMA)
        size = as_integer(field(record, "size"), "`size`")
        time = as_integer(field(record, "mtime_ns"), "`mtime_ns`", -(2**63))
        raw = as_text(field(record, "header"), "`header`").encode()
    except RecordError as error:
        raise CheckpointError(f"{path}: {error}", hint="restore it, or the shard that it stands for") from error
    return parse_header(root / file, raw, FileStamp(size, time, 0))
