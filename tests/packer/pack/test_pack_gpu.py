"""Packing for GPUs: the engines' own arrangement byte for byte, their one activation scale, whole experts per rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.ranks import plan_ranks
from tilewright.packer.pack.target import GpuTarget

Call = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
STACK = "model.layers.0.mlp.experts"
EXPERTS = 4


def native(hidden: int, inner: int, scales: bool = True) -> Tensors:
    """Experts as W4AFP8 checkpoints hold them: any byte is two weights; scales are bf16 numbers in fp32."""
    generator = torch.Generator().manual_seed(hidden + inner)
    tensors: Tensors = {}
    for e in range(EXPERTS):
        for name, w, (n, k) in (
            ("gate_proj", "w1", (inner, hidden)),
            ("up_proj", "w3", (inner, hidden)),
            ("down_proj", "w2", (hidden, inner)),
        ):
            weight = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
            tensors[f"{STACK}.{e}.{name}.weight"] = weight.view(torch.int8)
            scale = torch.rand(n, k // 128, generator=generator) + 0.1
            tensors[f"{STACK}.{e}.{name}.weight_scale_inv"] = scale.bfloat16().float()
            if scales:
                tensors[f"{STACK}.{e}.{w}.input_scale"] = torch.tensor([0.5 + e + (w == "w2") / 4]).bfloat16()
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(EXPERTS, hidden, generator=generator).bfloat16()
    return tensors


@pytest.fixture
def packed_for_gpu(write: Call, tmp_path: Path) -> Callable[..., Tensors]:
    """packed_for_gpu(tensors, layout): the tensors of the packed directory."""

    def pack(tensors: Tensors, layout: str) -> Tensors:
        source = open_checkpoint(write(tensors, quantization_config={"quant_method": "w4afp8"}))
        output = tmp_path / f"packed-{layout}-{len(list(tmp_path.iterdir()))}"
        execute(plan_pack(source, GpuTarget(layout)), source, output)
        return load_file(output / "model.safetensors")

    return pack


def interleaved(scales: torch.Tensor, a: int) -> torch.Tensor:
    """The engines' own arrangement of scales [E, N, G], as they do it when they load."""
    e, n, g = scales.shape
    return scales.bfloat16().reshape(e, n, g // a, a).permute(0, 2, 1, 3).reshape(e, g // a, n * a)


@pytest.mark.parametrize(
    ("k", "layout", "a"),
    [
        (512, "gpu-cutlass-w4", 4),
        (1024, "gpu-cutlass-w4", 4),
        (640, "gpu-cutlass-w4", 1),
        (256, "gpu-cutlass-w4", 1),
        (640, "gpu-trtllm-w4", 1),
        (256, "gpu-trtllm-w4", 2),
        (1024, "gpu-trtllm-w4", 4),
    ],
)
def test_engines_find_their_bytes(k: int, layout: str, a: int, packed_for_gpu: Callable[..., Tensors]) -> None:
    source = native(hidden=k, inner=128)
    got = packed_for_gpu(source, layout)
    order = ("up_proj", "gate_proj") if layout == "gpu-trtllm-w4" else ("gate_proj", "up_proj")

    def stacked(suffix: str, *names: str) -> torch.Tensor:
        return torch.stack([torch.cat([source[f"{STACK}.{e}.{name}.{suffix}"] for name in names]) for e in range(4)])

    assert torch.equal(got[f"{STACK}.w13.weight"], stacked("weight", *order))
    assert torch.equal(got[f"{STACK}.w2.weight"], stacked("weight", "down_proj"))
    assert torch.equal(got[f"{STACK}.w13.scales"], interleaved(stacked("weight_scale_inv", *order), a))
    assert torch.equal(got[f"{STACK}.w2.scales"], interleaved(stacked("weight_scale_inv", "down_proj"), 1))
    router = "model.layers.0.mlp.gate.weight"
    assert torch.equal(got[router], source[router])


@pytest.mark.parametrize("k", [512, 640, 1024])
def test_the_bundled_order_holds_the_same_weights(k: int, packed_for_gpu: Callable[..., Tensors], write: Call) -> None:
    """Compared by the byte formula of docs/format.md, one number at a time."""
    source = native(hidden=k, inner=128)
    tiles = packed_for_gpu(source, "gpu-hopper-w4")[f"{STACK}.w13.tiles"]
    for e, row, column in [(0, 0, 0), (1, 3, 65), (3, 200, 130), (2, 255, k - 1), (1, 100, k // 2)]:
        name = "gate_proj" if row < 128 else "up_proj"
        stored = int(source[f"{STACK}.{e}.{name}.weight"].view(torch.uint8)[row % 128, column // 2])
        nibble = stored >> 4 if column % 2 else stored & 15
        v = nibble - 16 if nibble > 7 else nibble
        byte = int(tiles[e, row // 64, column // 128, row % 64, column % 64])
        low = column % 128 < 64
        sign, m = (byte >> 7, byte >> 1 & 7) if low else (byte & 1, byte >> 4 & 7)
        assert (-m - 1 if sign else m) == v


@pytest.mark.parametrize(
    ("layout", "first", "second"),
    [("gpu-cutlass-w4", 1.5, 1.75), ("gpu-hopper-w4", 1.5, 1.75), ("gpu-trtllm-w4", 3.5, 1.75)],
)
def test_the_activation_scale_is_the_engines(
    layout: str, first: float, second: float, write: Call, tmp_path: Path
) -> None:
    """Rank 0 of two holds experts 0 and 1; TensorRT-LLM takes w13's from all ranks."""
    source = open_checkpoint(write(native(512, 128), quantization_config={"quant_method": "w4afp8"}))
    plans = plan_ranks(source, GpuTarget(layout), 1, 2)
    assert not plans[0].rejects
    execute(plans[0], source, tmp_path / "rank-0-of-2")
    got = load_file(tmp_path / "rank-0-of-2" / "model.safetensors")
    assert (float(got[f"{STACK}.w13.input_scale"]), float(got[f"{STACK}.w2.input_scale"])) == (first, second)
    assert got[f"{STACK}.w13.input_scale"].dtype == torch.float32


def test_a_missing_activation_scale_is_refused(write: Call) -> None:
    tensors = native(512, 128)
    del tensors[f"{STACK}.2.w3.input_scale"]
    source = open_checkpoint(write(tensors, quantization_config={"quant_method": "w4afp8"}))
    rejects = plan_pack(source, GpuTarget()).rejects
    assert [(reject.name, reject.reason[:6]) for reject in rejects] == [(f"{STACK}.w13", "1 of 8")]


def test_without_activation_scales_there_is_none(packed_for_gpu: Callable[..., Tensors]) -> None:
    assert not [name for name in packed_for_gpu(native(512, 128, scales=False), "gpu-hopper-w4") if "input" in name]


@pytest.mark.parametrize("form", ["native", "compressed-tensors"])
@pytest.mark.parametrize("model", ["tiny-qwen3-moe", "tiny-deepseek-v3"])
def test_ranks_hold_the_experts_in_order(model: str, form: str, quantized: Call, tmp_path: Path) -> None:
    source = open_checkpoint(quantized(model, "w4afp8", form))
    execute(plan_pack(source, GpuTarget()), source, tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    shares = []
    for rank, plan in enumerate(plan_ranks(source, GpuTarget(), 1, 2)):
        execute(plan, source, tmp_path / f"rank-{rank}")
        shares.append(load_file(tmp_path / f"rank-{rank}" / "model.safetensors"))
    header = read_header(tmp_path / "rank-1" / "model.safetensors").metadata
    assert json.loads(header["tilewright.cut"]) == {"tp": [0, 1], "ep": [1, 2]}
    modules = {name: ModuleSpec.from_json(name, f) for name, f in json.loads(header["tilewright.modules"]).items()}
    assert modules
    for name, spec in modules.items():
        assert spec.first_expert == spec.shape[0] == spec.whole[0] // 2
        for suffix in spec.tensors():
            both = torch.cat([share[f"{name}.{suffix}"] for share in shares])
            assert torch.equal(both, whole[f"{name}.{suffix}"])
