"""Read one safetensors file: the header first, then any tensor as a view of the mapped file.

The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data,
without holes or overlaps. The safetensors library reads tensors too, but tells neither where one lies in the file
(which streamed copies need) nor which rule a damaged file breaks; so headers are parsed and checked here.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .tensors import TensorSpec

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # the safetensors library refuses longer headers too


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies.

    Attributes:
        spec: dtype and shape.
        start: First byte, counted from the beginning of the file.
    """

    spec: TensorSpec
    start: int


@dataclass(frozen=True)
class Header:
    """The checked header of a safetensors file.

    Attributes:
        path: The file.
        metadata: The free-form string map, empty if absent.
        entries: Tensors in the order of their data.
    """

    path: Path
    metadata: dict[str, str]
    entries: dict[str, Entry]


def read_header(path: Path) -> Header:
    """Parse and check the header of `path`; no tensor byte is read.

    Raises:
        CheckpointError: The file is missing, cut, padded, or breaks a rule of the format.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path}: the header claims {length} bytes, but the file has {size}",
                    hint="the file is cut off or not a safetensors file; fetch it again",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    metadata, entries = _parse(path, raw, 8 + length)
    end = max((entry.start + entry.spec.nbytes for entry in entries.values()), default=8 + length)
    if end != size:
        kind = "cut off" if size < end else "longer than its tensors"
        raise CheckpointError(
            f"{path}: the file is {kind}: its header describes {end} bytes, the file has {size}",
            hint="fetch the file again; a shorter file reads as zeros, a longer one was written by a broken tool",
        )
    return Header(path, metadata, entries)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{twice}` appears twice")
    return result


def _parse(path: Path, raw: bytes, data_start: int) -> tuple[dict[str, str], dict[str, Entry]]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("`__metadata__` is not a map of strings")
        found = sorted((_entry(name, fields) for name, fields in header.items()), key=lambda item: item[2:])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: broken safetensors header: {error}", hint="fetch the file again") from error
    entries: dict[str, Entry] = {}
    position = 0
    for name, spec, start, end in found:
        if start != position:
            raise CheckpointError(
                f"{path}: tensor `{name}` starts at data byte {start}, but the one before it ends at {position}",
                hint="holes and overlaps are forbidden; the file was written by a broken tool",
            )
        entries[name] = Entry(spec, data_start + start)
        position = end
    return metadata, entries


def _entry(name: str, fields: Any) -> tuple[str, TensorSpec, int, int]:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"`{name}` needs dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"`{name}` has dtype {dtype!r}, known are {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"`{name}` has shape {shape!r} and data_offsets {offsets!r}, natural numbers are expected")
    spec = TensorSpec(DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        raise ValueError(f"`{name}` is {dtype} {shape}, {spec.nbytes} bytes, but its data_offsets are {offsets}")
    return name, spec, offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class MappedFile:
    """A safetensors file mapped into memory; tensors are views of its pages.

    The mapping is private: nothing is read before it is touched, pages are shared between processes, and a write to a
    tensor (which nothing here does) would not reach the file.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        with header.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` as a view of the mapped pages; it keeps the mapping alive."""
        entry = self.header.entries[name]
        count = math.prod(entry.spec.shape)
        if count == 0:
            return torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
        flat = torch.frombuffer(self._map, dtype=entry.spec.dtype, count=count, offset=entry.start)
        return flat.reshape(entry.spec.shape)
