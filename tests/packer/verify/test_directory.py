"""Directories as logical weights: every form of every scheme is sound, and damage is found under the right name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.schemes import SCHEMES
from tilewright.packer.verify.weights import TensorResult, compare_weights

MODELS = Path(__file__).parents[3] / "examples" / "models"
Tensors = dict[str, torch.Tensor]
Quantize = Callable[..., Path]
Edit = Callable[[Path, Callable[[Tensors], None]], Path]
QWEN, DEEPSEEK = "tiny-qwen3-moe", "tiny-deepseek-v3"
FORMS = [(scheme.id, form) for scheme in SCHEMES.values() for form in scheme.checkpoint_formats]
VICTIM = "model.layers.2.self_attn.o_proj"  # square, so that a transposed weight has the right shape
EXPERT = "model.layers.1.mlp.experts.3"


def results(reference: Path, candidate: Path) -> list[TensorResult]:
    sides = [read_contents(open_checkpoint(path)) for path in (reference, candidate)]
    found = [result for result, _ in compare_weights(*sides)]
    return sorted(found, key=lambda result: result.badness, reverse=True)


def failed(reference: Path, candidate: Path) -> list[str]:
    return [result.name for result in results(reference, candidate) if result.failed]


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
@pytest.mark.parametrize(("scheme", "form"), FORMS)
def test_every_form_is_sound(model: str, scheme: str, form: str, quantized: Quantize) -> None:
    found = results(MODELS / model, quantized(model, scheme, form))
    assert [result for result in found if result.failed] == []
    plain = load_file(MODELS / model / "model.safetensors")
    assert sorted(result.name for result in found) == sorted(plain)
    assert all(result.status == "equal" for result in found if result.format is None)


@pytest.mark.parametrize("scheme", ["block-fp8", "int8"])
def test_forms_of_a_scheme_hold_the_same_numbers(scheme: str, quantized: Quantize) -> None:
    native, other = (quantized(QWEN, scheme, form) for form in SCHEMES[scheme].checkpoint_formats)
    assert all(result.status == "equal" for result in results(native, other))


def swap_rows(scale: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        rows = tensors[scale].clone()
        tensors[scale][[0, -1]] = rows[[-1, 0]]

    return change


def double(scale: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[scale][0] *= 2

    return change


def transpose(weight: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(weight, tensors[weight].T.contiguous())


def shift(weight: str) -> Callable[[Tensors], None]:
    """Every code moves to its neighbour's place, nibbles across the borders of bytes."""

    def change(tensors: Tensors) -> None:
        raw = tensors[weight].contiguous().view(torch.uint8)
        low, high = raw & 15, raw >> 4
        tensors[weight] = ((high << 4).roll(0, -1) | low.roll(1, -1)).view(tensors[weight].dtype)

    return change


@pytest.mark.parametrize(
    ("scheme", "weight", "scale"),
    [
        ("block-fp8", f"{VICTIM}.weight", f"{VICTIM}.weight_scale_inv"),
        ("int8", f"{VICTIM}.weight", f"{VICTIM}.weight_scale"),
        ("w4afp8", f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale_inv"),
        ("int4", f"{EXPERT}.down_proj.weight_packed", f"{EXPERT}.down_proj.weight_scale"),
    ],
)
def test_damage_is_found_under_its_name(scheme: str, weight: str, scale: str, quantized: Quantize, edit: Edit) -> None:
    good = quantized(QWEN, scheme)
    changes = {"swapped scale rows": swap_rows(scale), "doubled scale": double(scale), "shifted codes": shift(weight)}
    if weight.startswith(VICTIM):
        changes["transposed"] = transpose(weight)
    for what, change in changes.items():
        assert failed(MODELS / QWEN, edit(good, change)) == [weight.replace("_packed", "")], what


def test_swapped_gate_and_up(quantized: Quantize, edit: Edit) -> None:
    def change(tensors: Tensors) -> None:
        for suffix in ("weight", "weight_scale"):
            gate, up = f"{EXPERT}.gate_proj.{suffix}", f"{EXPERT}.up_proj.{suffix}"
            tensors[gate], tensors[up] = tensors[up], tensors[gate]

    bad = edit(quantized(QWEN, "int8"), change)
    assert sorted(failed(MODELS / QWEN, bad)) == [f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"]


def test_layer_of_another_checkpoint(quantized: Quantize, edit: Edit) -> None:
    """A layer that belongs elsewhere: each of its tensors is named, copied norms too, and nothing else."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith("model.layers.1."):
                tensors[name] = tensors[name.replace("layers.1.", "layers.2.")]

    layer = {name for name in load_file(MODELS / QWEN / "model.safetensors") if name.startswith("model.layers.1.")}
    assert set(failed(MODELS / QWEN, edit(quantized(QWEN, "int8"), change))) == layer


def test_missing_and_added_tensors(quantized: Quantize, edit: Edit) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(3)
        tensors["model.layers.0.input_layernorm.weight"][5] += 1

    found = {r.name: r.status for r in results(MODELS / QWEN, edit(quantized(QWEN, "int8"), change)) if r.failed}
    assert found == {
        "model.norm.weight": "missing",
        "model.extra.weight": "unexpected",
        "model.layers.0.input_layernorm.weight": "differs",
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_match_separate_ones(transposed: bool, tmp_path: Path, quantized: Quantize) -> None:
    """The same experts as one tensor per layer: the reference may be either."""
    tensors = load_file(MODELS / QWEN / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        base = f"model.layers.{layer}.mlp.experts"

        def part(expert: int, name: str, base: str = base) -> torch.Tensor:
            return tensors[f"{base}.{expert}.{name}.weight"]

        merged = [torch.cat([part(e, "gate_proj"), part(e, "up_proj")]) for e in range(8)]
        for name, matrices in (("gate_up_proj", merged), ("down_proj", [part(e, "down_proj") for e in range(8)])):
            stack = torch.stack(matrices)
            stacked[f"{base}.{name}"] = (stack.mT if transposed else stack).contiguous()
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((MODELS / QWEN / "config.json").read_bytes())
    assert all(result.status == "equal" for result in results(tmp_path, MODELS / QWEN))
    assert failed(tmp_path, quantized(QWEN, "int8")) == []


def test_dropped_layers_are_told_apart_from_lost_ones(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(MODELS / DEEPSEEK / "model.safetensors")
    tensors |= {k.replace("layers.3.", "layers.4."): v.clone() for k, v in tensors.items() if "layers.3." in k}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_bytes((MODELS / DEEPSEEK / "config.json").read_bytes())
    checkpoint = open_checkpoint(source)
    execute(plan_quantize(checkpoint, QuantizeOptions("int8", mtp="drop")), checkpoint, tmp_path / "output")
    found = results(source, tmp_path / "output")
    assert {r.name for r in found if r.status == "dropped"} == {name for name in tensors if "layers.4." in name}
    assert not any(result.failed for result in found)
