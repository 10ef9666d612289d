"""Whatever stands in a file that we read: it is accepted, or refused by an error of ours in a few words, at once.

Every record begins as a legal one and is then changed: values of other types, numbers without bounds, keys that go,
bytes that flip. A longer run by hand: `TILEWRIGHT_FUZZ=100000 pytest tests/test_fuzz_records.py`.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tilewright.kernels.errors import TilewrightError
from tilewright.kernels.packed.directory import load_packed
from tilewright.kernels.packed.manifest import read_manifest
from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.checkpoint.consumed import keep_header, read_kept
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.records.journal import read_journal
from tilewright.packer.records.ledger import read_ledger
from tilewright.packer.records.manifest import check_files

EXAMPLES = int(os.environ.get("TILEWRIGHT_FUZZ", "700")) // 7  # for each of seven records
SHARD, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "x", "\ud800", "\x1b[31m\u202e", "../../etc/passwd", "/dev/zero", "é" * 3000, "9" * 5000, "a\0b"),
    *([], [[]], [0], [2**62, 2**62], {}, {"": None}, {"x": {}}),
)


def dumps(value: Any) -> bytes:
    """JSON, with what is no JSON too, and lists that are nested without end."""
    text = json.dumps(value)
    return text.replace('"DEEP"', "[" * 100_000 + "]" * 100_000).replace('"HUGE"', "1e999").encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    found = [path]
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += places(value[key], (*path, key))
    return found


def mutated(document: Any, rng: random.Random) -> bytes:
    """The document with one to three things changed."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        *above, last = rng.choice([path for path in places(document) if path] or [(None,)])
        if last is None:
            return dumps(rng.choice(WEIRD))
        place = document
        for key in above:
            place = place[key]
        how = rng.randrange(4)
        if how == 0:
            del place[last]
        elif how == 1 and isinstance(place, dict):
            place[str(rng.choice(("x", "\ud800", "", "é" * 300)))] = place.pop(last)
        else:
            place[last] = rng.choice((*WEIRD, "DEEP", "HUGE", copy.deepcopy(place)))
    content = bytearray(dumps(document))
    if rng.random() < 0.2 and content:
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content[: rng.randrange(len(content))] if rng.random() < 0.05 else content)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, packed: Callable[..., Path]) -> Path:
    """A packed directory, which has all records."""
    return packed("tiny-qwen3-moe", "int8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of one small tensor."""
    save_file({"a.weight": torch.ones(4, 4)}, tmp_path / SHARD)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "time_step_limit": [0.0, Infinity]}')
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a.weight": SHARD}}))
    return tmp_path


def check(read: Callable[[], object]) -> bool:
    """Whether it was accepted; everything else is an error of ours, soon, short, without much memory."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = None
    try:
        read()
    except TilewrightError as error:
        message = str(error)
    assert message is None or 0 < len(message) < 2000
    assert all(c.isprintable() or c == "\n" for c in message or "")
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10
    return message is None


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_header(path: Path, text: bytes, data: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


DIGEST = "0" * 64
LEDGER = {
    "schema": 2,
    "notes": ["x"],
    "tensors": {
        "a.weight": {"fate": "copied", "reason": "y", "dtype": "F32", "shape": [4, 4], "outputs": ["a.weight"]}
    },
}
MANIFEST = {
    "schema": 2,
    "tilewright": "0.1.0",
    "plan": "p",
    "options": {"solver": "rtn", "x": [1, {"y": None}]},
    "layouts": {"cpu-vnni-int8": 1},
    "files": {SHARD: {"size": 10, "sha256": DIGEST}, "config.json": {"size": 2, "sha256": DIGEST}},
}
JOURNAL = [
    {"schema": 2, "tilewright": "0.1.0", "plans": {"": "p"}, "source": {SHARD: [10, "d", 5]}},
    {"file": SHARD, "size": 10, "sha256": DIGEST},
    {"consumed": SHARD},
]
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW)
seeds = given(seed=st.integers(0, 2**32 - 1))


@fuzzed
@seeds
def test_header(root: Path, seed: int) -> None:
    document: Any = {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}, "__metadata__": {"x": "y"}}
    data = bytes(64)
    path = root / "other.safetensors"
    write_header(path, dumps(document), data)
    assert check(lambda: read_header(path))
    write_header(path, mutated(document, random.Random(seed)), data)
    check(lambda: read_header(path))


@fuzzed
@seeds
def test_config_and_index(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(("config.json", INDEX))
    legal = (root / name).read_bytes()
    assert check(lambda: open_checkpoint(root))
    (root / name).write_bytes(mutated(json.loads(legal), rng))
    check(lambda: open_checkpoint(root))
    (root / name).write_bytes(legal)


@fuzzed
@seeds
def test_manifest(root: Path, seed: int) -> None:
    path = root / "manifest.json"
    old = {key: value for key, value in MANIFEST.items() if key != "schema"}  # of release 0.1
    for legal in (MANIFEST, old, {**MANIFEST, "new": 1}, [1], {"of": "another tool"}):
        path.write_bytes(dumps(legal))
        assert check(lambda: read_manifest(root))
    path.write_bytes(mutated(MANIFEST, random.Random(seed)))
    check(lambda: check_files(root, {SHARD}))


@fuzzed
@seeds
def test_ledger(root: Path, seed: int) -> None:
    path = root / "ledger.json"
    for legal in (LEDGER, {"notes": [], "tensors": {}}):
        path.write_bytes(dumps(legal))
        assert check(lambda: read_ledger(root))
    path.write_bytes(mutated(LEDGER, random.Random(seed)))
    check(lambda: read_ledger(root))


@fuzzed
@seeds
def test_journal(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = root / ".tilewright-partial" / "journal"
    path.parent.mkdir(exist_ok=True)
    lines = [dumps(line) for line in JOURNAL]
    for torn in (b"", b'{"file": "mod'):
        path.write_bytes(b"\n".join(lines) + b"\n" + torn)
        assert check(lambda: read_journal(root))
    number = rng.randrange(3)
    lines[number] = mutated(JOURNAL[number], rng)
    path.write_bytes(b"\n".join(lines) + b"\n")
    check(lambda: read_journal(root))


@fuzzed
@seeds
def test_kept_header(root: Path, seed: int) -> None:
    keep_header(root, SHARD, read_header(root / SHARD))
    path = root / ".tilewright-consumed" / f"{SHARD}.json"
    assert check(lambda: read_kept(root, SHARD))
    path.write_bytes(mutated(json.loads(path.read_bytes()), random.Random(seed)))
    check(lambda: read_kept(root, SHARD))


@fuzzed
@seeds
def test_module_metadata(packed: Path, root: Path, seed: int) -> None:
    """Headers of packed files, as `load_packed` reads them; the data is a hole."""
    rng = random.Random(seed)
    document, data = header_of(next(iter(sorted(packed.glob("*.safetensors")))))
    modules = json.loads(document["__metadata__"]["tilewright.modules"])
    chosen = dict(rng.sample(sorted(modules.items()), 2))
    key = rng.choice(("modules", "modules", "modules", "cut"))
    legal = {"modules": chosen, "cut": {"tp": [0, 1], "ep": [0, 1]}}[key]
    for content in (dumps(legal), mutated(legal, rng)):
        entries: dict[str, Any] = {"__metadata__": dict(document["__metadata__"])}
        entries["__metadata__"]["tilewright.modules"] = dumps(chosen).decode()
        entries["__metadata__"][f"tilewright.{key}"] = content.decode(errors="replace")
        start = 0
        for name, entry in document.items():
            if name.rpartition(".")[0] in chosen and name != "__metadata__":
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                entries[name] = {**entry, "data_offsets": [start, start + size]}
                start += size
        text = json.dumps(entries).encode()
        (root / INDEX).unlink(missing_ok=True)
        with (root / SHARD).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + start)
        files = {SHARD: {"size": (root / SHARD).stat().st_size, "sha256": DIGEST}}
        (root / "manifest.json").write_bytes(dumps({**MANIFEST, "files": files}))
        accepted = check(lambda: load_packed(root))
        assert accepted or content != dumps(legal)
