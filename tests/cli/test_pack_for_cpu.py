"""`pack-for-cpu` there and back, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.cli import pack_for_cpu
from tilewright.cli.main import load, run
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.packed.safetensors_file import read_header

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-deepseek-v3"


def leave(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        run(load("pack-for-cpu"), "pack-for-cpu", [str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_choices_are_what_the_registry_holds() -> None:
    assert list(pack_for_cpu.LAYOUTS) == [name for name in LAYOUTS if name.startswith("cpu-")]


def test_there_and_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave(MODEL, tmp_path / "packed", "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document["output"] == str(tmp_path / "packed")
    assert document["fates"] == {"packed": 105, "copied": 24}
    assert leave(tmp_path / "packed", tmp_path / "back", "--unpack") == 0
    for name in ("model.safetensors", "config.json"):
        size = (tmp_path / "back" / name).stat().st_size
        assert abs(size - (MODEL / name).stat().st_size) < 100
    assert leave(tmp_path / "packed", tmp_path / "again") == 1
    assert "is packed already" in capfd.readouterr().err
    assert leave(MODEL, tmp_path / "packed") == 1
    assert "--overwrite" in capfd.readouterr().err
    assert leave(MODEL, tmp_path / "packed", "--resume") == 0


def test_dry_run_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave(MODEL, tmp_path / "packed", "--dry-run") == 0
    assert "in layout cpu-vnni-bf16" in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_joined_unless_told_otherwise(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_up_proj"
    for options, found in (((), True), (("--no-join",), False)):
        assert leave(MODEL, tmp_path / str(found), *options) == 0
        metadata = read_header(tmp_path / str(found) / "model.safetensors").metadata
        assert (name in json.loads(metadata["tilewright.modules"])) is found


def test_wrong_usage(tmp_path: Path) -> None:
    assert leave(MODEL, tmp_path / "packed", "--layout", "cpu-vnni-int9") == 2
    assert leave(MODEL, tmp_path / "packed", "--layout", "cpu-vnni-int8", "--unpack") == 2
    assert leave(MODEL, tmp_path / "packed", "--no-join", "--unpack") == 2
