"""Which shard of a checkpoint holds which tensor: the index decides, and is checked against the shards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tilewright.kernels.errors import CheckpointError, shown
from tilewright.kernels.packed.safetensors_file import Header, read_header

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = "model" + INDEX_SUFFIX
SHOWN = 8  # names in one message; the rest is counted


@dataclass(frozen=True)
class Shards:
    """The weights of a checkpoint.

    Attributes:
        headers: Shard file name -> header.
        files: Tensor name -> shard file name.
        notes: What was noticed and is no reason to refuse.
    """

    headers: dict[str, Header]
    files: dict[str, str]
    notes: tuple[str, ...]


def listing(names: list[str]) -> str:
    """The first few of `names` in backticks and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(shown(name) for name in names[:SHOWN]) + more


def find_shards(root: Path, consumed: Path | None, problems: list[str]) -> Shards:
    """Read the index and the headers of all shards in `root`.

    Args:
        root: The checkpoint's directory.
        consumed: Where headers of shards lie that are gone because their content is safely written; or None.
        problems: Gets one line for each thing that is wrong; the result is only of use if there is none.

    Raises:
        CheckpointError: There is no way to know which files are meant.
    """
    index = _find_index(root)
    present = sorted(path.name for path in root.glob("*.safetensors"))
    if consumed is not None:
        present = sorted({*present, *(path.name for path in consumed.glob("*.safetensors"))})
    if index is None:
        if not present:
            hint = "weights in other formats (.bin, .gguf) have to be converted to safetensors first"
            raise CheckpointError(f"{root}: no .safetensors file", hint=hint)
        headers = _read_headers(root, present, consumed, problems)
        return Shards(headers, _files_without_index(headers, problems), ())
    weight_map = read_index(index)
    names = sorted(set(weight_map.values()))
    headers = _read_headers(root, names, consumed, problems)
    files, notes = _resolve(index.name, weight_map, headers, problems)
    ignored = [name for name in present if name not in headers and name not in names]
    if ignored:
        notes.append(f"not in {index.name} and so ignored: {listing(ignored)}")
    return Shards(headers, files, tuple(notes))


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
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {shown(str(error))}") from error
    weight_map: Any = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no `weight_map` from tensor names to files")
    bad = sorted({str(file) for file in weight_map.values() if not _stays_inside(file)})
    if bad:
        raise CheckpointError(
            f"{path}: names files that are no plain .safetensors names: {listing(bad)}",
            hint="shards must lie in the directory of their index; absolute paths and `..` are refused",
        )
    return weight_map


def _stays_inside(file: Any) -> bool:
    if not isinstance(file, str) or not file.isprintable() or "\\" in file or len(file.encode()) > 255:
        return False
    path = PurePosixPath(file)
    return path.suffix == ".safetensors" and not path.is_absolute() and ".." not in path.parts


def _read_headers(root: Path, names: list[str], consumed: Path | None, problems: list[str]) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    missing = []
    for name in names:
        path = root / name
        if not path.exists() and consumed is not None and (consumed / name).exists():
            path = consumed / name
        if not path.exists():
            missing.append(f"{name} (a dangling link)" if path.is_symlink() else name)
            continue
        try:
            headers[name] = read_header(path)
        except CheckpointError as error:
            problems.append(str(error))
    if missing:
        every = ", ".join(shown(name) for name in missing)
        problems.append(f"{len(missing)} of {len(names)} shards are missing: {every}; fetch them")
    return headers


def _files_without_index(headers: dict[str, Header], problems: list[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    twice = []
    for file, header in headers.items():
        twice += [f"{name} ({files[name]}, {file})" for name in header.entries if name in files]
        files.update(dict.fromkeys(header.entries, file))
    if twice:
        problems.append(f"no {INDEX_NAME}, and {len(twice)} tensors are in two shards: {listing(twice)}; add the index")
    return files


def _resolve(
    index: str, weight_map: dict[str, str], headers: dict[str, Header], problems: list[str]
) -> tuple[dict[str, str], list[str]]:
    """The index decides; tensors that it leaves out of a shard it names are kept, for engines would load them too."""
    absent = [n for n, file in weight_map.items() if file in headers and n not in headers[file].entries]
    if absent:
        problems.append(f"{index} names {len(absent)} tensors that are not in their shard: {listing(sorted(absent))}")
    files: dict[str, str] = {}
    notes, repeated, extra, twice = [], [], [], []
    for file, header in headers.items():
        for name in header.entries:
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
