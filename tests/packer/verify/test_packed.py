"""Packed directories as logical weights: sound in every scheme, and damage of packed bytes is found under its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.kernels.errors import VerifyError
from tilewright.kernels.packed.module_spec import ModuleSpec, RankSharding
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.packed import packed_modules
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget, GpuTarget
from tilewright.packer.verify.weights import TensorResult, compare_weights

MODELS = Path(__file__).parents[3] / "examples" / "models"
QWEN, DEEPSEEK = "tiny-qwen3-moe", "tiny-deepseek-v3"
SCHEMES = ("block-fp8", "int8", "int4", "w4afp8")
SQUARE = "model.layers.2.self_attn.o_proj"
STACK = "model.layers.1.mlp.experts"
Tensors = dict[str, torch.Tensor]
Packed = Callable[[str, str], Path]
Quantize = Callable[..., Path]
Edit = Callable[[Path, Callable[[Tensors], None]], Path]


def results(reference: Path, candidate: Path) -> list[TensorResult]:
    sides = [read_contents(open_checkpoint(path)) for path in (reference, candidate)]
    found = [result for result, _ in compare_weights(*sides)]
    return sorted(found, key=lambda result: result.badness, reverse=True)


def failed(reference: Path, candidate: Path) -> list[str]:
    return [result.name for result in results(reference, candidate) if result.failed]


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_is_sound_and_loses_nothing(model: str, scheme: str, packed: Packed, quantized: Quantize) -> None:
    """Against the source inside the bounds of the formats; against the checkpoint that was packed, equal."""
    found = results(MODELS / model, packed(model, scheme))
    assert [result for result in found if result.failed] == []
    assert sorted(result.name for result in found) == sorted(load_file(MODELS / model / "model.safetensors"))
    assert all(result.status == "equal" for result in results(quantized(model, scheme), packed(model, scheme)))


@pytest.mark.parametrize("target", [GpuTarget(), GpuTarget("gpu-cutlass-w4")], ids=lambda target: str(target.preferred))
def test_packed_experts_beside_unpacked_layers(target: GpuTarget, quantized: Quantize, tmp_path: Path) -> None:
    """A GPU directory packs experts alone: block-FP8 Linears beside them are still those of the checkpoint."""
    source = quantized(DEEPSEEK, "w4afp8")
    checkpoint = open_checkpoint(source)
    execute(plan_pack(checkpoint, target), checkpoint, tmp_path / "gpu")
    found = results(MODELS / DEEPSEEK, tmp_path / "gpu")
    assert [result for result in found if result.failed] == []
    assert {result.format for result in found} == {"int4-g128", "fp8", None}
    assert all(result.status == "equal" for result in results(source, tmp_path / "gpu"))


def scale_name(tensors: Tensors, module: str) -> str:
    """The name of the scales of a packed module, which lie in rows or in blocks of 32 rows."""
    (name,) = (name for name in tensors if name.startswith(f"{module}.weight_scale"))
    return name


def scale_of(tensors: Tensors, module: str) -> torch.Tensor:
    return tensors[scale_name(tensors, module)]


def matrix(spec: ModuleSpec, tensors: Tensors, module: str) -> Tensors:
    return {suffix: tensors[f"{module}.{suffix}"] for suffix in spec.tensors()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_damage_of_a_linear(scheme: str, packed: Packed, edit: Edit) -> None:
    good = packed(QWEN, scheme)
    spec = packed_modules(open_checkpoint(good))[SQUARE]

    def swapped(tensors: Tensors) -> None:
        scales = scale_of(tensors, SQUARE)
        scales[[0, -1]] = scales[[-1, 0]].clone()

    def doubled(tensors: Tensors) -> None:
        scale_of(tensors, SQUARE).flatten()[-1:].mul_(2)

    def transposed(tensors: Tensors) -> None:
        q = spec.layout.unpack(matrix(spec, tensors, SQUARE), spec.format, spec.shape)
        flipped = type(q)(q.format, q.codes.T.contiguous(), q.scales, q.zeros)
        tensors.update({f"{SQUARE}.{suffix}": tensor for suffix, tensor in spec.layout.pack(flipped).items()})

    def shifted(tensors: Tensors) -> None:
        weight = tensors[f"{SQUARE}.weight"]
        raw = weight.view(torch.uint8).flatten()
        tensors[f"{SQUARE}.weight"] = ((raw >> 4) | (raw.roll(1) << 4)).view(weight.dtype).reshape(weight.shape)

    for change in (swapped, doubled, transposed, shifted):
        assert failed(MODELS / QWEN, edit(good, change)) == [f"{SQUARE}.weight"], change.__name__


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_damage_of_a_joined_linear(scheme: str, packed: Packed, edit: Edit) -> None:
    """Of q, k and v in one module, the one that was damaged is named, whichever of its tensors it was."""
    good = packed(QWEN, scheme)
    module = "model.layers.2.self_attn.qkv_proj"
    spec = packed_modules(open_checkpoint(good))[module]
    for name, (_, rows) in spec.linears().items():

        def doubled(tensors: Tensors, rows: slice = rows) -> None:
            suffix = scale_name(tensors, module).removeprefix(f"{module}.")
            part = spec.take({suffix: scale_of(tensors, module)}, rows)[suffix]
            part.flatten()[-1:].mul_(2)

        def shifted(tensors: Tensors, rows: slice = rows) -> None:
            part = spec.take({"weight": tensors[f"{module}.weight"]}, rows)["weight"]
            part.copy_(part.flatten().roll(1).reshape(part.shape))

        for change in (doubled, shifted):
            assert failed(MODELS / QWEN, edit(good, change)) == [f"{name}.weight"], change.__name__


@pytest.mark.parametrize("scheme", SCHEMES)
def test_swapped_gate_and_up(scheme: str, packed: Packed, edit: Edit) -> None:
    """Halves of w13 exchanged for one expert, weight and scales together: both projections are named."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(f"{STACK}.w13.")]:
            gate, up = tensors[name][5].clone().chunk(2)
            tensors[name][5] = torch.cat((up, gate))

    bad = edit(packed(QWEN, scheme), change)
    assert sorted(failed(MODELS / QWEN, bad)) == [f"{STACK}.5.gate_proj.weight", f"{STACK}.5.up_proj.weight"]


@pytest.mark.parametrize("scheme", ["int8", "w4afp8"])
def test_layer_of_another_checkpoint(scheme: str, packed: Packed, edit: Edit) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith("model.layers.1."):
                tensors[name] = tensors[name.replace("layers.1.", "layers.2.")]

    layer = {name for name in load_file(MODELS / QWEN / "model.safetensors") if name.startswith("model.layers.1.")}
    assert set(failed(MODELS / QWEN, edit(packed(QWEN, scheme), change))) == layer


def test_a_bias_comes_back_in_its_dtype(tmp_path: Path) -> None:
    """A Linear with a bias, packed in fp32, is the bf16 bias of the source."""
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(MODELS / QWEN / "model.safetensors")
    tensors |= {f"{SQUARE}.bias": torch.randn(256).bfloat16()}
    save_file(tensors, source / "model.safetensors")
    config = json.loads((MODELS / QWEN / "config.json").read_text()) | {"attention_bias": True}
    (source / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(source)
    execute(plan_pack(checkpoint, CpuTarget()), checkpoint, tmp_path / "packed")
    assert all(result.status == "equal" for result in results(source, tmp_path / "packed"))


def test_a_share_of_a_model_is_refused(quantized: Quantize, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantized(QWEN, "int8"))
    execute(plan_pack(checkpoint, CpuTarget(), RankSharding(ep=(1, 2))), checkpoint, tmp_path / "rank-1")
    with pytest.raises(VerifyError, match="the share of rank 1 of 2"):
        read_contents(open_checkpoint(tmp_path / "rank-1"))
