"""The safetensors reader: what the library writes is read, every broken rule is named, nothing crashes or hangs."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.safetensors_file import DTYPES, MappedFile, read_header

FUZZ = settings(max_examples=100)


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def tensor(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPES.values():
        if dtype == torch.complex64 or dtype == torch.float8_e8m0fnu:
            continue  # not every version of the library writes these
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5, 8), generator=generator, dtype=torch.uint8)
        tensors[str(dtype)] = raw.view(dtype)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 64), "ä\n": torch.ones(1)}
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    header = read_header(tmp_path / "a.safetensors")
    assert header.metadata == {"format": "pt"}
    assert set(header.entries) == set(tensors)
    mapped = MappedFile(header)
    for name, want in tensors.items():
        found = mapped.tensor(name)
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        assert found.reshape(-1).view(torch.uint8).equal(want.reshape(-1).view(torch.uint8)), name


def test_reads_the_dtypes_that_libraries_write_late(tmp_path: Path) -> None:
    data = bytes(range(11))
    header = {"e": tensor("F8_E8M0", [3], [0, 3]), "c": tensor("C64", [1], [3, 11])}
    mapped = MappedFile(read_header(write(tmp_path / "a.safetensors", header, data)))
    assert mapped.tensor("e").view(torch.uint8).tolist() == [0, 1, 2]
    assert bytes(torch.view_as_real(mapped.tensor("c")).view(torch.uint8).reshape(-1).tolist()) == data[3:]


def test_misaligned_tensors_become_aligned_copies(tmp_path: Path) -> None:
    data = b"\x01" + struct.pack("<3f", 1.0, 2.0, 3.0)
    path = write(tmp_path / "a.safetensors", {"a": tensor("U8", [1], [0, 1]), "b": tensor("F32", [3], [1, 13])}, data)
    for pad in range(4):
        header = json.dumps({"a": tensor("U8", [1], [0, 1]), "b": tensor("F32", [3], [1, 13])}).encode() + b" " * pad
        found = MappedFile(read_header(write(path, header, data))).tensor("b")
        assert found.tolist() == [1.0, 2.0, 3.0]
        assert found.data_ptr() % 4 == 0


def test_a_write_to_a_view_does_not_reach_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": tensor()}, b"abcd")
    mapped = MappedFile(read_header(path))
    mapped.tensor("a").zero_()
    assert path.read_bytes().endswith(b"abcd")
    mapped.forget(0, path.stat().st_size)


def test_empty_tensors_share_a_place_with_others(tmp_path: Path) -> None:
    header = {
        "z": tensor("F32", [0, 7], [4, 4]),
        "a": tensor("U8", [4], [0, 4]),
        "b": tensor("U8", [4], [4, 8]),
        "y": tensor("F32", [2, 0], [8, 8]),
        "x": tensor("F32", [0], [0, 0]),
    }
    read = read_header(write(tmp_path / "a.safetensors", header, b"abcdefgh"))
    assert set(read.entries) == set(header)
    assert MappedFile(read).tensor("z").shape == (0, 7)
    assert MappedFile(read).tensor("b").tolist() == list(b"efgh")
    none = read_header(write(tmp_path / "b.safetensors", {}))
    assert none.entries == {}
    assert MappedFile(none).header.size == 10


BROKEN: dict[str, tuple[Any, bytes, str]] = {
    "not JSON": (b"{oops", b"", "broken safetensors header"),
    "not UTF-8": (b'{"\xff": 1}', b"", "broken safetensors header"),
    "a list": ([], b"", "not a JSON object"),
    "deep": (b"[" * 100_000, b"", "broken safetensors header"),
    "repeated name": (b'{"a": {}, "a": {}}', b"", "`a` appears twice"),
    "repeated field": (
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
        b"abcd",
        "`dtype` appears twice",
    ),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "map of strings"),
    "metadata a list": ({"__metadata__": []}, b"", "map of strings"),
    "missing field": ({"a": {"dtype": "U8", "shape": [4]}}, b"abcd", "needs dtype, shape and data_offsets"),
    "extra field": ({"a": tensor(strides=[1])}, b"abcd", "nothing else"),
    "unknown dtype": ({"a": tensor("F4")}, b"abcd", "dtype `F4`, known are"),
    "dtype a list": ({"a": tensor(["U8"])}, b"abcd", "known are"),  # type: ignore[arg-type]
    "negative shape": ({"a": tensor(shape=[-4])}, b"abcd", "natural numbers"),
    "fraction": ({"a": tensor(shape=[4.0])}, b"abcd", "natural numbers"),
    "truth": ({"a": tensor(shape=[True, 4])}, b"abcd", "natural numbers"),
    "huge shape": ({"a": tensor(shape=[10**40, 0])}, b"abcd", "natural numbers"),
    "huge rank": ({"a": tensor(shape=[1] * 65 + [4])}, b"abcd", "up to 64"),
    "huge product": ({"a": tensor(shape=[2**62] * 64)}, b"abcd", "bytes, but its data_offsets leave 4"),
    "endless number": (b'{"a":' + b"9" * 50_000 + b"}", b"", "broken safetensors header"),
    "one offset": ({"a": tensor(offsets=[0])}, b"abcd", "two natural numbers"),
    "offsets backwards": ({"a": tensor(offsets=[4, 0])}, b"abcd", "leave -4"),
    "wrong size": ({"a": tensor("F32")}, b"abcd", "16` bytes"),
    "hole": ({"a": tensor(), "b": tensor(offsets=[5, 9])}, b"abcdefghi", "`b` starts at data byte 5.*a hole"),
    "overlap": ({"a": tensor(), "b": tensor(offsets=[3, 7])}, b"abcdefg", "an overlap"),
    "cut": ({"a": tensor()}, b"abc", "cut off"),
    "padded": ({"a": tensor()}, b"abcde", "longer than its tensors"),
    "no data": ({"a": tensor()}, b"", "cut off"),
    "half a character": (b'{"\\ud800": {}}', b"", "no name"),
    "no name": ({"": tensor()}, b"abcd", "no name"),
    "control characters": ({"a\n\x1b[31m" + "b" * 9999: {}}, b"", "needs dtype"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_broken_rule_is_named(tmp_path: Path, case: str) -> None:
    header, data, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(write(tmp_path / "a.safetensors", header, data))
    first = str(caught.value).split("\nhint:")[0]
    assert first.isprintable()
    assert len(first) < 1000
    assert "a.safetensors" in first


def test_short_and_strange_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for content in (b"", b"1234567", b"\xff" * 8, b"\xff" * 100, struct.pack("<Q", 3) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="the header claims"):
            read_header(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointError, match=r"git-lfs pointer[\s\S]*git lfs pull"):
        read_header(path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="not a file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="not a file"):
        read_header(tmp_path / "pipe.safetensors")


def test_a_file_that_changes_after_its_header_was_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": tensor()}, b"abcd")
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="had .* bytes when its header was read"):
        MappedFile(header)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        MappedFile(header)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        MappedFile(header)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries({
    "dtype": st.sampled_from(["U8", "F16", "F32", "F8_E4M3", "X"]) | JSON,
    "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
    "data_offsets": st.tuples(st.integers(0, 40), st.integers(0, 40)) | JSON,
})  # fmt: skip
HEADER = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ENTRY | JSON, max_size=4)


def agree(path: Path) -> None:
    """Either our reader refuses with its own error, or it and the library read the same."""
    try:
        header = read_header(path)
        mapped = MappedFile(header)
        ours = {name: mapped.tensor(name) for name in header.entries}
    except CheckpointError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert refusal.count("\n") <= 1
        return
    try:
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(ours)
        theirs = load_file(path)
    except (SafetensorError, RuntimeError, KeyError, AttributeError):
        return  # it knows fewer dtypes
    for name, found in ours.items():
        assert found.reshape(-1).view(torch.uint8).equal(theirs[name].reshape(-1).view(torch.uint8))


@FUZZ
@given(header=HEADER, data=st.binary(max_size=40))
def test_fuzzed_headers(tmp_path: Path, header: Any, data: bytes) -> None:
    agree(write(tmp_path / "a.safetensors", header, data))


@FUZZ
@given(
    seed=st.integers(0, 9),
    flips=st.lists(st.tuples(st.integers(0, 399), st.integers(0, 7)), max_size=3),
    cut=st.integers(0, 400),
)
def test_flipped_bits_and_cuts(tmp_path: Path, seed: int, flips: list[tuple[int, int]], cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.randn(3, 5, generator=generator), "b": torch.arange(7), "c": torch.ones(2).bfloat16()}, path)
    content = bytearray(path.read_bytes())
    for position, bit in flips:
        content[position % len(content)] ^= 1 << bit
    path.write_bytes(content[: len(content) - cut] if cut > 300 else content)
    agree(path)


@FUZZ
@given(content=st.binary(max_size=64))
def test_fuzzed_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    agree(path)
    agree(write(path, content))
