"""The shipped models, quantized once per run in every scheme and form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

MODELS = Path(__file__).parents[3] / "examples" / "models"
Tensors = dict[str, torch.Tensor]
Quantize = Callable[..., Path]
Edit = Callable[[Path, Callable[[Tensors], None]], Path]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are too small to share: on a busy machine a second thread is only waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """A function (model, scheme, form) -> directory with the shipped model in that scheme."""
    root = tmp_path_factory.mktemp("quantized")

    def make(model: str, scheme: str, form: str | None = None, source: Path | None = None) -> Path:
        output = root / f"{model}-{scheme}-{form}"
        if not output.exists():
            checkpoint = open_checkpoint(source or MODELS / model)
            execute(plan_quantize(checkpoint, QuantizeOptions(scheme, form)), checkpoint, output)
        return output

    return make


@pytest.fixture(scope="session")
def packed(quantized: Quantize, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A function (model, scheme) -> directory with the shipped model in that scheme, packed for CPUs."""
    root = tmp_path_factory.mktemp("packed")

    def make(model: str, scheme: str) -> Path:
        output = root / f"{model}-{scheme}"
        if not output.exists():
            checkpoint = open_checkpoint(quantized(model, scheme))
            execute(plan_pack(checkpoint, CpuTarget()), checkpoint, output)
        return output

    return make


@pytest.fixture
def edit(tmp_path: Path) -> Edit:
    """A function (directory, change) -> copy of the directory whose tensors went through `change`."""

    def make(directory: Path, change: Callable[[Tensors], None]) -> Path:
        copy = tmp_path / f"edited-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(directory, copy)
        path = copy / "model.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata)
        manifest = copy / "manifest.json"
        if manifest.exists():
            document = json.loads(manifest.read_text())
            document["files"]["model.safetensors"]["size"] = path.stat().st_size
            manifest.write_text(json.dumps(document))
        return copy

    return make
