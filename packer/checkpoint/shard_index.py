"""Which shard of a checkpoint holds which tensor: the index decides, and is checked against the shards."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tilewright.kernels.errors import CheckpointError, quoted
from tilewright.kernels.packed.records import read_object
from tilewright.kernels.packed.safetensors_file import Header, read_header

from .consumed import kept_files, read_kept

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = "model" + INDEX_SUFFIX
SINGLE = "model.safetensors"
COUNTED = re.compile(r"-\d+-of-(\d+)\.safetensors$")
SHOWN = 8  # names in one message; the rest is counted
UNFINISHED = (".aria2", ".part", ".incomplete", ".tmp", ".crdownload")  # what downloading tools leave beside a file
HOLE = 4096  # bytes: a page of zeros at the end


@dataclass(frozen=True)
class Shards:
    """The weights of a checkpoint.

    Attributes:
        headers: Shard file name -> header.
        files: Tensor name -> shard file name.
        notes: What was noticed and is no reason to refuse.
        index: The index file, or None without one.
    """

    headers: dict[str, Header]
    files: dict[str, str]
    notes: tuple[str, ...]
    index: Path | None = None


def listing(names: list[str]) -> str:
    """The first few of `names` in backticks and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(quoted(name) for name in names[:SHOWN]) + more


def find_shards(root: Path, consumed: bool, problems: list[str], *, indexed: bool = True) -> Shards:
    """Read the index and the headers of all shards in `root`.

    Args:
        root: The checkpoint's directory.
        consumed: Do without shards of which `--consume` has kept only the header.
        indexed: Let the index decide; otherwise the shards tell what is in them.
        problems: Gets one line for each thing that is wrong; the result is only of use if there is none.

    Raises:
        CheckpointError: There is no way to know which files are meant.
    """
    index = _find_index(root) if indexed else None
    present = sorted(path.name for path in root.glob("*.safetensors"))
    present = sorted({*present, *(name for name in kept_files(root) if "/" not in name)})
    if index is None:
        if not present:
            hint = "weights in other formats (.bin, .pt) have to be converted to safetensors first"
            raise CheckpointError(f"{root}: no .safetensors file", hint=hint)
        present, ignored = _meant(root, present, problems)
        headers = read_headers(root, present, consumed, problems)
        notes = [f"{present[0]} is what is read; ignored beside it: {listing(ignored)}"] if ignored else []
        notes += _download_notes(root, headers)
        return Shards(headers, _files_without_index(headers, problems), tuple(notes))
    weight_map = read_index(index)
    names = sorted(set(weight_map.values()))
    headers = read_headers(root, names, consumed, problems)
    files, notes = _resolve(index.name, weight_map, headers, problems)
    ignored = [name for name in present if name not in headers and name not in names]
    if ignored:
        notes.append(f"not in {index.name} and so ignored: {listing(ignored)}")
    notes += _download_notes(root, headers)
    return Shards(headers, files, tuple(notes), index)


def _meant(root: Path, present: list[str], problems: list[str]) -> tuple[list[str], list[str]]:
    """The files that are a model, of a directory without an index, and those that are something else.

    Raises:
        CheckpointError: There are several, and nothing says which are meant.
    """
    if SINGLE in present:  # what transformers reads
        return [SINGLE], [name for name in present if name != SINGLE]
    counted = {name: found for name in present if (found := COUNTED.search(name))}
    kinds = {(name[: counted[name].start()], counted[name][1]) if name in counted else name for name in present}
    if len(kinds) == 1:
        count = int(counted[present[0]][1]) if counted else 1
        if count != len(present):
            problems.append(f"no {INDEX_NAME}, and only {listing(present)} of {count} shards; fetch the others")
        return present, []
    hint = f"name one of them, or add {INDEX_NAME}, which says what is in which"
    reason = f"no {INDEX_NAME}, and {len(present)} files of weights: {listing(present)}"
    raise CheckpointError(f"{root}: {reason}", hint=hint)


def _find_index(root: Path) -> Path | None:
    if (root / INDEX_NAME).exists():
        return root / INDEX_NAME
    found = sorted(root.glob(f"*{INDEX_SUFFIX}"))
    if len(found) > 1:
        names = listing([path.name for path in found])
        raise CheckpointError(f"{root}: {len(found)} indexes and none is {INDEX_NAME}: {names}")
    return found[0] if found else None


def read_index(path: Path) -> dict[str, str]:
    """The map tensor name -> shard file name of an index file.

    Raises:
        CheckpointError: It is not such a map, or leads out of its directory.
    """
    weight_map: Any = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no `weight_map` from tensor names to files")
    files = {file: file for file in weight_map.values() if isinstance(file, str)}
    bad = sorted(
        {str(file) for file in weight_map.values() if not isinstance(file, str)}
        | {file for file in files if not _stays_inside(file)}
    )
    if bad:
        raise CheckpointError(
            f"{path}: names files that are no plain .safetensors names: {listing(bad)}",
            hint="shards must lie in the directory of their index; absolute paths and `..` are refused",
        )
    return {name: files[file] for name, file in weight_map.items()}  # one object for each file


def _stays_inside(file: str) -> bool:
    if not file.isprintable() or "\\" in file or len(file.encode()) > 255:
        return False
    path = PurePosixPath(file)
    return path.suffix == ".safetensors" and not path.is_absolute() and ".." not in path.parts


def read_headers(root: Path, names: list[str], consumed: bool, problems: list[str]) -> dict[str, Header]:
    """Headers of the shards `names`, by name; those that `--consume` has kept stand for shards that are gone."""
    headers: dict[str, Header] = {}
    missing: list[str] = []
    used: list[str] = []
    kept = set(kept_files(root))
    for name in names:
        path = root / name
        if not path.exists() and (name not in kept or not consumed):
            (used if name in kept else missing).append(f"{name} (a dangling link)" if path.is_symlink() else name)
            continue
        try:
            headers[name] = read_header(path) if path.exists() else read_kept(root, name)
        except CheckpointError as error:
            problems.append(str(error))
    if used:
        reason = f"{len(used)} of {len(names)} shards were deleted by a run with --consume: {listing(used)}"
        problems.append(f"{reason}; only the same command with --resume can go on")
    if missing:
        every = ", ".join(quoted(name) for name in missing)
        problems.append(f"{len(missing)} of {len(names)} shards are missing: {every}; fetch them")
    return headers


def _download_notes(root: Path, headers: dict[str, Header]) -> Iterator[str]:
    """What looks as if shards were still on their way, or lies elsewhere."""
    partial = [f"{name}{end}" for name in headers for end in UNFINISHED if (root / f"{name}{end}").exists()]
    if partial:
        yield f"beside the shards lie {listing(partial)}: a download that may not be finished"
    empty = [name for name, header in headers.items() if header.path.exists() and _ends_in_a_hole(header)]
    if empty:
        yield f"nothing was ever written at the end of {listing(empty)}: a download that may not be finished"
    elsewhere = [name for name, header in headers.items() if leads_out(root, header.path)]
    if elsewhere:
        yield f"links to files outside of the source, followed: {listing(elsewhere)}"


def _ends_in_a_hole(header: Header) -> bool:
    """Whether the file system holds nothing for the last bytes: room was made for them, and they read as zeros."""
    if header.size - header.data_start < HOLE:
        return False
    with header.path.open("rb") as file:
        try:
            return os.lseek(file.fileno(), header.size - HOLE, os.SEEK_DATA) >= header.size
        except OSError as error:
            return error.errno == errno.ENXIO  # no data up to the end


def leads_out(root: Path, path: Path) -> bool:
    """Whether a file is a link that leads out of its directory, and not into the blobs of a hub's cache."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return not target.is_relative_to(root.resolve()) and target.parent != (root.parent.parent / "blobs").resolve()


def _files_without_index(headers: dict[str, Header], problems: list[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    twice = []
    for file, header in headers.items():
        twice += [f"{name} ({files[name]}, {file})" for name in header.specs if name in files]
        files.update(dict.fromkeys(header.specs, file))
    if twice:
        problems.append(f"no {INDEX_NAME}, and {len(twice)} tensors are in two shards: {listing(twice)}; add the index")
    return files


def _resolve(
    index: str, weight_map: dict[str, str], headers: dict[str, Header], problems: list[str]
) -> tuple[dict[str, str], list[str]]:
    """The index decides; tensors that it leaves out of a shard it names are kept, for engines would load them too."""
    absent = [n for n, file in weight_map.items() if file in headers and n not in headers[file].specs]
    if absent:
        problems.append(f"{index} names {len(absent)} tensors that are not in their shard: {listing(sorted(absent))}")
    files: dict[str, str] = {}
    notes, repeated, extra, twice = [], [], [], []
    for file, header in headers.items():
        for name in header.specs:
            owner = weight_map.get(name, file)
            if owner != file:
                repeated.append(f"{name} ({file}, taken from {owner})")
            elif name in files:
                twice.append(name)
            else:
                files[name] = file
                extra += [name] if name not in weight_map else []
    if twice:
        problems.append(f"{len(twice)} tensors are in two shards and not in {index}: {listing(twice)}")
    if repeated:
        notes.append(f"in two shards, {index} decides: {listing(repeated)}")
    if extra:
        notes.append(f"in a shard but not in {index}, treated like the others: {listing(extra)}")
    return files, notes
