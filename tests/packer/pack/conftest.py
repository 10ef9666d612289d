"""Small sources of every kind that packing meets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.pack.unpack import plan_unpack
from tilewright.packer.plan import Plan
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(tensors, **config): a source directory of one file."""

    def write_source(tensors: Tensors, **config: object) -> Path:
        root = tmp_path / f"source-{len(list(tmp_path.iterdir()))}"
        root.mkdir()
        widths = [
            len(tensor) for name, tensor in tensors.items() if name.endswith(("o_proj.weight", "down_proj.weight"))
        ]
        config = {"model_type": "qwen3_moe", "hidden_size": widths[0] if widths else 64} | config
        (root / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, root / "model.safetensors")
        return root

    return write_source


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Path]:
    """convert(source, scheme, **options): a new directory with it quantized; "none" is the source itself."""

    def convert_source(source: Path, scheme: str, **options: Any) -> Path:
        if scheme == "none":
            return source
        output = tmp_path / f"quantized-{len(list(tmp_path.iterdir()))}"
        checkpoint = open_checkpoint(source)
        execute(plan_quantize(checkpoint, QuantizeOptions(scheme, **options)), checkpoint, output)
        return output

    return convert_source


@pytest.fixture
def plan() -> Callable[[Path], Plan]:
    """plan(source): the plan of packing it for CPUs."""
    return lambda source: plan_pack(open_checkpoint(source), CpuTarget())


@pytest.fixture
def pack(tmp_path: Path) -> Callable[[Path], Path]:
    """pack(source): a new directory with it packed for CPUs."""

    def pack_source(source: Path) -> Path:
        output = tmp_path / f"packed-{len(list(tmp_path.iterdir()))}"
        checkpoint = open_checkpoint(source)
        execute(plan_pack(checkpoint, CpuTarget()), checkpoint, output)
        return output

    return pack_source


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[[Path], Path]:
    """unpack(packed): a new directory with the checkpoint that it was made from."""

    def unpack_packed(source: Path) -> Path:
        output = tmp_path / f"unpacked-{len(list(tmp_path.iterdir()))}"
        checkpoint = open_checkpoint(source)
        execute(plan_unpack(checkpoint), checkpoint, output)
        return output

    return unpack_packed


@pytest.fixture
def differences() -> Callable[[Path, Path], list[str]]:
    """differences(a, b): names of the tensors of two directories that differ in dtype, shape or bytes."""

    def raw(tensor: torch.Tensor | None) -> object:
        if tensor is None:
            return None
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def compare(a: Path, b: Path) -> list[str]:
        ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
        return sorted(name for name in {*ours, *theirs} if raw(ours.get(name)) != raw(theirs.get(name)))

    return compare
