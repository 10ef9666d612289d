"""Weights that take rotated inputs: what is written, who else computes the same, and what reads it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.transform import TransformConfig, apply_transform_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tilewright
from tilewright.kernels.errors import PlanError
from tilewright.kernels.modules import build_module
from tilewright.kernels.ops.reference import quantize_rows
from tilewright.kernels.rotation import Rotation, rotate
from tilewright.packer.checkpoint import detect_weights
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.packed import packed_modules
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.sharding import sharding_of_rank
from tilewright.packer.pack.target import CpuTarget, GpuTarget
from tilewright.packer.plan import Source
from tilewright.packer.progress import Silent
from tilewright.packer.quantize.options import QuantizeOptions

MODELS = Path(__file__).parents[3] / "examples" / "models"
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def quantize(source: Path, output: Path, scheme: str, **options: Any) -> Path:
    tilewright.quantize(source, output, QuantizeOptions(scheme, **options), progress=Silent())
    return output


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose widths have blocks of 32 (hidden), 64 (down_proj) and 32 columns, with outlier channels."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True)
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] = 30
            layer.post_attention_layernorm.weight[70] = 30
    root = tmp_path_factory.mktemp("llama") / "source"
    model.to(torch.bfloat16).save_pretrained(root)
    return root


def decompressed(output: Path) -> LlamaForCausalLM:
    """The model as compressed-tensors decompresses its weights; nothing is rotated back."""
    block = json.loads((output / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(block).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(block["format"])
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(output / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        if name.endswith("_proj." + suffix):
            modules.setdefault(module, {})[suffix] = tensor
        else:
            tensors[name] = tensor.float()
    tensors |= {f"{module}.weight": compressor.decompress(t, group)["weight"].float() for module, t in modules.items()}
    config = LlamaConfig.from_pretrained(output)
    del config.quantization_config
    model = LlamaForCausalLM(config)
    wrong = model.load_state_dict(tensors, strict=False)
    assert set(wrong.missing_keys) <= {"lm_head.weight"}
    assert not wrong.unexpected_keys
    return model.eval()


@pytest.mark.parametrize(("scheme", "most", "same"), [("int8", 0.05, 1e-4), ("int4", 0.5, 0.02)])
@pytest.mark.parametrize("name", ["hadamard-32", "hadamard-64", "hadamard-128"])
@torch.inference_mode()
def test_compressed_tensors_computes_the_function_of_the_source(
    llama: Path, tmp_path: Path, scheme: str, most: float, same: float, name: str
) -> None:
    options = {"group_size": 32} if scheme == "int4" else {}
    output = quantize(llama, tmp_path / "out", scheme, rotate_inputs=name, **options)
    tokens = torch.randint(0, 61, (3, 17))
    wanted = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()(tokens).logits
    model = decompressed(output)
    block = json.loads((output / "config.json").read_text())["quantization_config"]
    config = TransformConfig.model_validate(block["transform_config"])
    unrotated = model(tokens).logits
    for group in config.config_groups.values():
        group.apply = [step for step in group.apply if step.is_online()]
    apply_transform_config(model, config)
    found = model(tokens).logits
    assert (found - wanted).norm() < most * wanted.norm()
    assert (unrotated - wanted).norm() > 0.5 * wanted.norm()
    ours = decompressed(output)
    for name, weight in read_contents(open_checkpoint(output)).weights.items():
        if weight.format:
            ours.get_parameter(name).copy_(weight.values())
    assert (ours(tokens).logits - found).norm() < same * wanted.norm()  # theirs are in the dtype of the scales


def test_each_width_takes_the_largest_block_that_divides_it(llama: Path, tmp_path: Path) -> None:
    output = quantize(llama, tmp_path / "out", "int8", rotate_inputs="hadamard-128")
    weights = {weight.module: weight for weight in detect_weights(*_seen(output)).weights}
    assert weights[Q].rotation == Rotation(32)
    assert weights[DOWN].rotation == Rotation(64)
    groups = json.loads((output / "config.json").read_text())["quantization_config"]["transform_config"][
        "config_groups"
    ]
    assert {name: group["head_dim"] for name, group in groups.items()} == {"hadamard-32": 32, "hadamard-64": 64}
    assert set(groups["hadamard-64"]["apply"][0]["targets"]) == {DOWN, DOWN.replace("1", "0")}
    assert DOWN in groups["hadamard-32"]["apply"][0]["ignore"]


def _seen(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    checkpoint = open_checkpoint(root)
    return {name: checkpoint.spec(name) for name in checkpoint.files}, dict(checkpoint.config)


def test_weights_are_rotated_before_they_are_rounded(llama: Path, tmp_path: Path) -> None:
    output = quantize(llama, tmp_path / "out", "int8", rotate_inputs="hadamard-64")
    source, found = open_checkpoint(llama).tensor(Source(f"{DOWN}.weight")), load_file(output / "model.safetensors")
    weight = rotate(source.double(), 64)
    scales = found[f"{DOWN}.weight_scale"].double()
    assert torch.allclose(scales, weight.abs().amax(1, keepdim=True) / 127, rtol=1e-2)
    assert ((found[f"{DOWN}.weight"] * scales - weight).abs() <= scales * 0.5001 + 1e-6).all()
    values = read_contents(open_checkpoint(output)).weights[f"{DOWN}.weight"].values()
    assert (values - source.float()).norm() < 0.02 * source.float().norm()


def test_no_format_that_cannot_say_it(tmp_path: Path) -> None:
    for options in ({"scheme": "int8", "checkpoint_format": "native"}, {"scheme": "w4afp8"}, {"scheme": "block-fp8"}):
        with pytest.raises(PlanError, match="cannot say that inputs are rotated"):
            QuantizeOptions(**options, rotate_inputs="hadamard-64").resolved()
    assert QuantizeOptions("int8").resolved()["form"] == "native"  # never the default
    assert QuantizeOptions("int8", rotate_inputs="hadamard-32").resolved()["form"] == "compressed-tensors"
    with pytest.raises(tilewright.OptionError, match="hadamard-48"):
        QuantizeOptions("int8", rotate_inputs="hadamard-48")


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_packing_keeps_it_and_kernels_rotate(llama: Path, tmp_path: Path, scheme: str) -> None:
    options = {"group_size": 32} if scheme == "int4" else {}
    output = quantize(llama, tmp_path / "out", scheme, rotate_inputs="hadamard-64", **options)
    tilewright.pack(output, tmp_path / "cpu", progress=Silent())
    packed = open_checkpoint(tmp_path / "cpu")
    spec = packed_modules(packed)[DOWN]
    assert spec.rotation == Rotation(64)
    module = build_module(DOWN, spec, {suffix: packed.tensor(Source(f"{DOWN}.{suffix}")) for suffix in spec.tensors()})
    x = torch.randn(7, 320)
    x[:, 3] *= 40
    codes, factors = quantize_rows(x, 0, 64)
    values = read_contents(open_checkpoint(output)).weights[f"{DOWN}.weight"].values()
    wanted = rotate(codes.float() * factors, 64) @ values.T
    assert (module(x) - wanted).norm() < 1e-4 * wanted.norm()
    tilewright.unpack(tmp_path / "cpu", tmp_path / "back", progress=Silent())
    before, after = load_file(output / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (output / "config.json").read_text()
    )


def test_levels_of_verification_understand_it(tmp_path: Path) -> None:
    source = MODELS / "tiny-deepseek-v3"
    output = quantize(source, tmp_path / "out", "int8", rotate_inputs="hadamard-64")
    tilewright.pack(output, tmp_path / "cpu", progress=Silent())
    options = tilewright.VerifyOptions(level="model", text=MODELS / "heldout.txt", windows=2, window=32)
    result = tilewright.verify(source, tmp_path / "cpu", options, progress=Silent())
    assert result.passed, result.failures()
    assert result.model
    assert result.model.overall.kl < 2e-3
    assert tilewright.verify(output, tmp_path / "cpu", progress=Silent()).passed  # equal codes
    plain = quantize(source, tmp_path / "plain", "int8")
    tensors = tilewright.verify(plain, output, progress=Silent()).tensors  # an unrotated source, quantized once more
    assert all(result.error is None or result.error.relative < 0.02 for result in tensors)


def test_a_rotated_source_is_read_like_any_other(llama: Path, tmp_path: Path) -> None:
    rotated = quantize(llama, tmp_path / "rotated", "int8", rotate_inputs="hadamard-64")
    again = quantize(rotated, tmp_path / "again", "int8", rotate_inputs="hadamard-64")
    plain = quantize(rotated, tmp_path / "plain", "int8")
    first, second, third = (load_file(path / "model.safetensors") for path in (rotated, again, plain))
    assert all(torch.equal(first[name], second[name]) for name in first)
    weight = open_checkpoint(llama).tensor(Source(f"{Q}.weight")).float()
    values = third[f"{Q}.weight"] * third[f"{Q}.weight_scale"].float()
    assert (values - weight).norm() < 0.03 * weight.norm()
    assert not torch.equal(first[f"{Q}.weight"], third[f"{Q}.weight"])


def test_who_cannot_rotate_refuses(tmp_path: Path) -> None:
    source = quantize(MODELS / "tiny-qwen3-moe", tmp_path / "out", "int4", rotate_inputs="hadamard-128")
    checkpoint = open_checkpoint(source)
    assert any("no gpu kernel" in str(reject) for reject in plan_pack(checkpoint, GpuTarget()).rejects)
    assert not plan_pack(checkpoint, CpuTarget()).rejects
    eighths = quantize(MODELS / "tiny-qwen3-moe", tmp_path / "int8", "int8", rotate_inputs="hadamard-128")
    rejects = plan_pack(open_checkpoint(eighths), CpuTarget(), sharding_of_rank(0, 2, 1)).rejects
    assert any("blocks of 128" in str(reject) for reject in rejects)  # 64 columns of the experts' down projections


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another transform": lambda group: group.update(type="random-matrix"),
    "a random one": lambda group: group.update(randomize=True),
    "the whole width": lambda group: group.update(head_dim=None),
    "no power of two": lambda group: group.update(head_dim=48),
    "no block of K": lambda group: group.update(head_dim=128),
    "outputs": lambda group: group["apply"][0].update(location="output"),
    "weights alone": lambda group: group["apply"].pop(0),
    "other modules": lambda group: group["apply"][0].update(ignore=[]),
    "a key of tomorrow": lambda group: group.update(tomorrow=1),
    "a step that is none": lambda group: group.update(apply=[1]),
    "16-bit weights": lambda group: [step.update(ignore=[]) for step in group["apply"]],
}


@pytest.mark.parametrize("what", CHANGES)
def test_transforms_that_are_not_read_are_refused(what: str, llama: Path, tmp_path: Path) -> None:
    output = quantize(llama, tmp_path / "out", "int8", rotate_inputs="hadamard-32", exclude=("down_proj",))
    specs, config = _seen(output)
    assert not detect_weights(specs, config).rejects
    (group,) = config["quantization_config"]["transform_config"]["config_groups"].values()
    CHANGES[what](group)
    assert detect_weights(specs, config).rejects


def test_two_rotations_of_one_module_are_refused(llama: Path, tmp_path: Path) -> None:
    output = quantize(llama, tmp_path / "out", "int8", rotate_inputs="hadamard-128")
    specs, config = _seen(output)
    groups = config["quantization_config"]["transform_config"]["config_groups"]
    for step in groups["hadamard-64"]["apply"]:
        step["targets"].append(Q)
    (reject,) = detect_weights(specs, config).rejects
    assert "more than one rotation" in str(reject)


def test_dense_and_expert_models_are_told_who_runs_them(llama: Path, tmp_path: Path) -> None:
    options = QuantizeOptions("int8", rotate_inputs="hadamard-64")
    notes = tilewright.quantize(llama, tmp_path / "a", options, dry_run=True, progress=Silent()).notes
    assert any("transformers and SGLang do not read it" in note for note in notes)
    assert not any("routed experts" in note for note in notes)
    moe = tilewright.quantize(MODELS / "tiny-qwen3-moe", tmp_path / "b", options, dry_run=True, progress=Silent())
    assert any("routed experts" in note for note in moe.notes)
