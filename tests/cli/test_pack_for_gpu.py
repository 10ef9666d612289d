"""`pack-for-gpu` there and back, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tilewright.cli import pack_for_gpu
from tilewright.cli.main import load, run
from tilewright.kernels.layouts import LAYOUTS

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-deepseek-v3"


def leave(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        run(load("pack-for-gpu"), "pack-for-gpu", [str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_choices_are_what_the_registry_holds() -> None:
    assert list(pack_for_gpu.LAYOUTS) == [name for name in LAYOUTS if name.startswith("gpu-")]


@pytest.mark.parametrize("layout", pack_for_gpu.LAYOUTS)
def test_there_and_back(
    layout: str, quantized: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = quantized("tiny-deepseek-v3", "w4afp8", "native")
    assert leave(source, tmp_path / "packed", "--layout", layout, "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document["fates"]["packed"] > 0
    assert document["bits_per_weight"] < 8
    assert leave(tmp_path / "packed", tmp_path / "back", "--unpack") == 0
    before, after = (load_file(root / "model.safetensors") for root in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert after[name].flatten().view(dtype=tensor.dtype).equal(tensor.flatten()), name
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_one_directory_for_each_rank(quantized: Callable[..., Path], tmp_path: Path) -> None:
    assert leave(quantized("tiny-qwen3-moe", "w4afp8", "native"), tmp_path / "packed", "--ep", 2) == 0
    found = sorted(path.name for path in (tmp_path / "packed").iterdir() if path.is_dir())
    assert found == ["rank-0-of-2", "rank-1-of-2"]
    ours, rank = (tmp_path / "packed" / folder / "config.json" for folder in ("", "rank-0-of-2"))
    assert ours.read_bytes() == rank.read_bytes()


def test_refusals_say_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert leave(MODEL, tmp_path / "packed") == 1
    assert "--scheme w4afp8" in capfd.readouterr().err
    assert leave(MODEL, tmp_path / "packed", "--layout", "gpu-vnni") == 2
    assert leave(MODEL, tmp_path / "packed", "--unpack", "--ep", 2) == 2
    assert list(tmp_path.iterdir()) == []
