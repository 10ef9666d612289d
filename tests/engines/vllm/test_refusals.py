"""A directory that is damaged, incomplete or cut otherwise is refused by name: vLLM never serves a wrong answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tilewright
from tilewright.kernels.packed.safetensors_file import read_header

Served = Callable[[str, str], Path]
FAMILY = "tiny-qwen3-moe"


@pytest.fixture
def directory(served: Served, tmp_path: Path) -> Path:
    """A packed directory that the test may change."""
    return Path(shutil.copytree(served(FAMILY, "int8"), tmp_path / "packed"))


def without(directory: Path, name: str) -> None:
    """Take a tensor, or all of a packed module, out of a packed directory."""
    file = directory / "model.safetensors"
    metadata = read_header(file).metadata
    described = json.loads(metadata["tilewright.modules"])
    described.pop(name, None)
    tensors = {key: value for key, value in load_file(file).items() if key != name and not key.startswith(f"{name}.")}
    write(directory, tensors, metadata, described)


def write(directory: Path, tensors: dict[str, Any], metadata: dict[str, str], described: dict[str, Any]) -> None:
    """Write a packed directory's file anew, and let its manifest agree."""
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata | {"tilewright.modules": json.dumps(described)})
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["size"] = file.stat().st_size
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.experts.w2"],
)
def test_a_missing_tensor(name: str, engine: Any, directory: Path) -> None:
    without(directory, name)
    assert "model.layers.1." in engine.ask(directory)["error"]


def test_a_shard_that_is_cut_off(engine: Any, directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    assert "model.safetensors: the file is cut off" in engine.ask(directory)["error"]


def test_no_manifest(engine: Any, directory: Path) -> None:
    (directory / "manifest.json").unlink()
    assert "no finished packed directory" in engine.ask(directory)["error"]


def test_a_cut_for_other_ranks(engine: Any, source: Callable[[str], Path], tmp_path: Path) -> None:
    tilewright.pack(source(FAMILY), tmp_path / "packed", tilewright.PackOptions(tp=2), progress=tilewright.Silent())
    error = engine.ask(tmp_path / "packed")["error"]
    assert "cut for tensor parallel 2" in error
    assert "--tensor-parallel-size 2" in error


def test_experts_that_compute_something_else(engine: Any, directory: Path) -> None:
    """VLLM's class for the family says what experts compute; a file that says otherwise is not run."""
    file = directory / "model.safetensors"
    metadata = read_header(file).metadata
    described = json.loads(metadata["tilewright.modules"])
    described["model.layers.0.mlp.experts.w13"]["activation"] = "gelu_tanh"
    write(directory, load_file(file), metadata, described)
    assert "experts are packed for `gelu_tanh`, vLLM runs `silu`" in engine.ask(directory)["error"]


def test_unpacked_checkpoints_are_packed_once(engine: Any, source: Callable[[str], Path], tmp_path: Path) -> None:
    """A native w8a8_int8 checkpoint, which vLLM itself refuses, served by its own name."""
    checkpoint = tmp_path / "quantized"
    tilewright.quantize(source(FAMILY), checkpoint, tilewright.QuantizeOptions("int8"), progress=tilewright.Silent())
    assert "error" in engine.ask(checkpoint)
    first = engine.ask(checkpoint, tokens=8, arguments={"load_format": "tilewright"})
    (packed,) = tmp_path.glob("quantized-packed-*")
    written = (packed / "manifest.json").stat().st_mtime_ns
    second = engine.ask(checkpoint, tokens=8, arguments={"load_format": "tilewright"})
    assert first["tokens"] == second["tokens"] == engine.ask(packed, tokens=8)["tokens"]
    assert (packed / "manifest.json").stat().st_mtime_ns == written


def test_a_folder_that_cannot_be_written_to(engine: Any, source: Callable[[str], Path]) -> None:
    arguments = {"load_format": "tilewright", "download_dir": "/proc/packed"}
    assert "/proc/packed: cannot be written to" in engine.ask(source(FAMILY), arguments=arguments)["error"]


@pytest.mark.matrix
def test_two_servers_that_start_at_once(
    engine: Any, engine_avx2: Any, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """One packs, the other waits; both serve, and no lock is left."""
    arguments = {"load_format": "tilewright", "download_dir": str(tmp_path)}
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(one.ask, source(FAMILY), arguments=arguments) for one in (engine, engine_avx2)]
        assert all("error" not in one.result() for one in both)
    assert len([*tmp_path.iterdir()]) == 1
