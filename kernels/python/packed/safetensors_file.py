"""Read one safetensors file: the header first, then any tensor as a view of the mapped file.

The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data,
without holes or overlaps. The safetensors library reads tensors too, but tells neither where one lies in the file
(which streamed copies need) nor which rule a damaged file breaks; so headers are parsed and checked here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
import stat
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, quoted
from ..tensors import TensorSpec

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
MAX_RANK = 64  # torch's kernels stop there
MAX_SIZE = 2**63 - 1  # of a dimension and of an offset; also keeps the product of a shape cheap to compute
FIELDS = {"dtype", "shape", "data_offsets"}  # of a tensor


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
class FileStamp:
    """What a file was at some moment, so that any later change is noticed.

    Attributes:
        size: In bytes.
        mtime_ns: Time of the last change, in nanoseconds.
        inode: Number of the file in its file system: another one if the file was replaced.
    """

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> FileStamp:
        """The stamp in what `stat` gives."""
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self, path: Path) -> str | None:
        """How the file `path` differs now, or None if it does not."""
        try:
            now = FileStamp.of(path.stat())
        except OSError as error:
            return f"cannot be read any more: {error.strerror}"
        if now.size != self.size:
            return f"had {self.size} bytes and has {now.size}"
        if now.inode != self.inode:
            return "was replaced by another file"
        return None if now == self else "was written to"


@dataclass(frozen=True)
class Header:
    """The checked header of a safetensors file.

    Attributes:
        path: The file.
        metadata: The free-form string map, empty if absent.
        specs: dtype and shape of each tensor, in the order of their data. Equal ones are one object: a model of
            hundreds of thousands of tensors has a few dozen of them.
        size: Size of the whole file in bytes.
        data_start: Where the data begins: everything before it is the header.
        digest: sha256 of the header's bytes, in hexadecimal.
        stamp: What the file was when the header was read.
    """

    path: Path
    metadata: dict[str, str]
    specs: dict[str, TensorSpec]
    size: int
    data_start: int
    digest: str
    stamp: FileStamp

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor lies: right behind the one before it. Planning does without, so they are made on demand."""
        ends = itertools.accumulate((spec.nbytes for spec in self.specs.values()), initial=self.data_start)
        return {name: Entry(spec, start) for (name, spec), start in zip(self.specs.items(), ends, strict=False)}


def read_header(path: Path) -> Header:
    """Parse and check the header of `path`; no tensor byte is read.

    Raises:
        CheckpointError: The file is missing, cut, padded, or breaks a rule of the format.
    """
    stamp, raw = _read_raw(path)
    return parse_header(path, raw, stamp)


def parse_header(path: Path, raw: bytes, stamp: FileStamp) -> Header:
    """Check the header `raw`, without its length, of the file `path`.

    Raises:
        CheckpointError: It breaks a rule of the format, or does not fit the size of the file.
    """
    data_start, size = 8 + len(raw), stamp.size
    try:
        metadata, found = _parse(raw)
        specs = _in_order(found)
    except (ValueError, RecursionError) as error:
        hint = "fetch the file again; if it stays like this, the tool that wrote it is broken"
        raise CheckpointError(f"{path}: broken safetensors header: {error}", hint=hint) from error
    end = data_start + sum(spec.nbytes for spec in specs.values())
    if end != size:
        kind = "cut off" if size < end else "longer than its tensors"
        raise CheckpointError(
            f"{path}: the file is {kind}: its header describes {end} bytes, the file has {size}",
            hint="fetch the file again; a shorter file reads as zeros, a longer one was written by a broken tool",
        )
    return Header(path, metadata, specs, size, data_start, hashlib.sha256(raw).hexdigest(), stamp)


def _read_raw(path: Path) -> tuple[FileStamp, bytes]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{path}: not a file", hint="name a .safetensors file or the folder that holds it")
        with path.open("rb") as file:
            stamp = FileStamp.of(os.fstat(file.fileno()))
            size = stamp.size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version " and size < 1024:
                hint = "run `git lfs pull` in the folder, or fetch the model with the hub's own tools"
                raise CheckpointError(f"{path}: a git-lfs pointer, not the weights themselves", hint=hint)
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path}: the header claims {length} bytes, but the file has {size}",
                    hint="the file is cut off or not a safetensors file; fetch it again",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) != length:
        raise CheckpointError(f"{path}: the file shrinks while it is read", hint="wait until its writer is done")
    return stamp, raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{quoted(name)} appears twice")
            seen.add(name)
    return result


def _parse(raw: bytes) -> tuple[dict[str, str], list[tuple[str, TensorSpec, int, int]]]:
    header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("`__metadata__` is not a map of strings")
    found = [_entry(name, fields) for name, fields in header.items()]
    return metadata, sorted(found, key=itemgetter(2, 3))


def _in_order(found: list[tuple[str, TensorSpec, int, int]]) -> dict[str, TensorSpec]:
    """The tensors in the order of their data, which must leave no hole."""
    position = 0
    for name, _, start, end in found:
        if start != position:
            kind = "a hole" if start > position else "an overlap"
            raise ValueError(
                f"{quoted(name)} starts at data byte {start}, the tensor before it ends at {position}: {kind}"
            )
        position = end
    return {name: spec for name, spec, _, _ in found}


@lru_cache(maxsize=4096)
def _spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """The one specification for this dtype and shape."""
    return TensorSpec(DTYPES[dtype], shape)


def _entry(name: str, fields: Any) -> tuple[str, TensorSpec, int, int]:
    try:
        name.encode()  # half a surrogate pair could never be written again
        if not name:
            raise ValueError("is no name for a tensor")
        return name, *_place_of(fields)
    except UnicodeEncodeError:
        raise ValueError(f"{quoted(name)} is no name for a tensor") from None
    except ValueError as error:
        raise ValueError(f"{quoted(name)} {error}") from None


def _place_of(fields: Any) -> tuple[TensorSpec, int, int]:
    if not isinstance(fields, dict) or fields.keys() != FIELDS:
        raise ValueError("needs dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"has dtype {quoted(str(dtype))}, known are {', '.join(DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"has shape {quoted(str(shape))}, up to {MAX_RANK} natural numbers are expected")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"has data_offsets {quoted(str(offsets))}, two natural numbers are expected")
    spec = _spec(dtype, tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        size, room = quoted(str(spec.nbytes)), offsets[1] - offsets[0]
        raise ValueError(f"is {dtype} {quoted(str(shape))}, {size} bytes, but its data_offsets leave {room}")
    return spec, offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_SIZE for item in value)


class MappedFile:
    """A safetensors file mapped into memory; tensors are views of its pages.

    The mapping is private: nothing is read before it is touched, pages are shared between processes, and a write to a
    tensor (which nothing here does) would not reach the file. It reserves no memory, so a file may be larger than RAM.
    """

    _FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names the flag from 3.13 on

    def __init__(self, header: Header) -> None:
        self.header = header
        try:
            with header.path.open("rb") as file:
                access = mmap.PROT_READ | mmap.PROT_WRITE  # torch wants writable memory
                self._map = mmap.mmap(file.fileno(), 0, flags=self._FLAGS, prot=access)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{header.path}: cannot be mapped: {error}") from error
        if len(self._map) != header.size:
            raise CheckpointError(
                f"{header.path}: had {header.size} bytes when its header was read, now {len(self._map)}",
                hint="nothing may write to a checkpoint while it is read",
            )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` as a view of the mapped pages; it keeps the mapping alive.

        A tensor that a careless writer put at an address its dtype does not allow is copied to one that does.
        """
        entry = self.header.entries[name]
        dtype, shape = entry.spec.dtype, entry.spec.shape
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if entry.start % dtype.itemsize:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.spec.nbytes, offset=entry.start)
            return raw.clone().view(dtype).reshape(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start).reshape(shape)

    def forget(self, start: int, length: int) -> None:
        """Drop the pages of a byte range from this process; they are read again if they are touched again."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: others may belong to a neighbour in use
        last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
