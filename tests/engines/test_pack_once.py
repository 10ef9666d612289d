"""A checkpoint is packed once, whoever comes, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilewright.engines import pack_once
from tilewright.engines.pack_once import is_packed, packed_once
from tilewright.kernels.errors import CheckpointError
from tilewright.kernels.packed.directory import load_packed

COMMAND = """
import sys
from pathlib import Path
from tilewright.engines.pack_once import packed_once
print(packed_once(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture
def source(tmp_path: Path, quantized: Callable[..., Path]) -> Path:
    """A checkpoint that this test may change."""
    return Path(shutil.copytree(quantized("tiny-qwen3-moe", "int8", "native"), tmp_path / "model"))


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_packs_once_and_maps_from_then_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    packed = packed_once(source, None, tell=told.append)
    assert any("this is done once" in line for line in told)
    assert is_packed(packed)
    assert not is_packed(source)
    assert packed.parent == source.parent
    assert len(load_packed(packed)) > 0
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started the second time
    assert packed_once(source, None) == packed
    assert left_behind(source.parent) == ["model", packed.name]


def test_a_changed_checkpoint_is_packed_anew(source: Path, tmp_path: Path) -> None:
    first = packed_once(source, tmp_path / "kept")
    os.utime(source / "model.safetensors", ns=(1, 1))
    second = packed_once(source, tmp_path / "kept")
    assert first != second
    assert left_behind(tmp_path / "kept") == sorted([first.name, second.name])


def test_ranks(source: Path) -> None:
    packed = packed_once(source, None, tp=2)
    assert (packed / "config.json").is_file()
    assert {load_packed(packed, rank).sharding.tp for rank in (0, 1)} == {(0, 2), (1, 2)}
    assert packed_once(source, None, tp=2) == packed


def test_two_at_once_pack_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    pack = pack_once._pack
    monkeypatch.setattr(pack_once, "_pack", lambda *arguments: (started.append(1), pack(*arguments)))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: packed_once(source, tmp_path / "kept"), range(3)))
    assert len(set(found)) == len(started) == 1
    assert left_behind(tmp_path / "kept") == [found[0].name]


@pytest.mark.parametrize("sign", [".*.lock", "model-packed-*", "model-packed-*/manifest.json"])
def test_killed_while_packing(sign: str, source: Path, tmp_path: Path) -> None:
    """Wherever it is killed, packing ends with it, and the next start gives what an undisturbed one gives."""
    process = subprocess.Popen([sys.executable, "-c", COMMAND, str(source), str(tmp_path / "kept")])
    while process.poll() is None and not any((tmp_path / "kept").glob(sign)):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    packed = packed_once(source, tmp_path / "kept")
    undisturbed = packed_once(source, tmp_path / "other")
    assert left_behind(tmp_path / "kept") == [packed.name]
    assert left_behind(packed) == left_behind(undisturbed)
    for path in packed.iterdir():
        assert path.read_bytes() == (undisturbed / path.name).read_bytes(), path.name


def test_refusals_name_the_reason_and_leave_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        packed_once(tmp_path / "nowhere", None)
    kept = tmp_path / "kept"
    kept.write_text("a file")
    with pytest.raises(CheckpointError, match="--download-dir"):
        packed_once(source, kept)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors: the file is cut off"):
        packed_once(source, tmp_path / "others")
    assert left_behind(tmp_path / "others") == []


def test_a_folder_that_cannot_be_written_to(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # permissions do not stop the superuser, whom tests may run as
    with pytest.raises(CheckpointError, match="cannot be written to: Permission denied"):
        packed_once(source, None)
