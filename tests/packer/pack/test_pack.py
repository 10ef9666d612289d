"""Packing moves codes and changes none; what it cannot pack it refuses or copies, with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import FORMATS
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.packed.module_spec import ModuleSpec
from tilewright.kernels.packed.safetensors_file import read_header
from tilewright.packer.pack.steps import split_rows
from tilewright.packer.plan import Plan
from tilewright.packer.schemes import SCHEMES

FORMS = [("none", None)] + [(scheme.id, form) for scheme in SCHEMES.values() for form in scheme.checkpoint_formats]
TINY = ("tiny-qwen3-moe", "tiny-deepseek-v3")
Call = Callable[..., Path]


def modules_of(directory: Path) -> dict[str, ModuleSpec]:
    metadata = read_header(directory / "model.safetensors").metadata
    described = json.loads(metadata["tilewright.modules"])
    return {name: ModuleSpec.from_json(name, fields) for name, fields in described.items()}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts(stack: str, count: int, inner: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> dict:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {
        f"{stack}.{number}.{kind}.weight": random(*shape, seed=7 * number + len(kind), dtype=dtype)
        for number in range(count)
        for kind, shape in shapes.items()
    }


@pytest.mark.parametrize(("scheme", "form"), FORMS)
@pytest.mark.parametrize("model", TINY)
def test_no_code_changes(model: str, scheme: str, form: str | None, quantized: Call, packed: Call) -> None:
    source = load_file(quantized(model, scheme, form) / "model.safetensors")
    output = packed(model, scheme, form)
    tensors = load_file(output / "model.safetensors")
    seen = set()
    for name, spec in modules_of(output).items():
        own = {suffix: tensors.pop(f"{name}.{suffix}") for suffix in spec.tensors()}
        whole = spec.layout.unpack(own, spec.format, spec.shape, spec.parts)
        stored = LAYOUTS[spec.source_layout]
        for number in range(spec.shape[0]) if len(spec.shape) == 3 else [0]:
            for part, template in zip(split_rows(whole, spec.source_rows), spec.sources, strict=True):
                module = template.format(number)
                codes = part.codes if part.codes.dim() == 2 else part.codes[number]
                scales = part.scales if part.scales is None or part.scales.dim() == 2 else part.scales[number]
                shape = tuple(codes.shape)
                suffixes = stored.specs(spec.format, shape)
                names = {suffix: f"{module}.{suffix}" for suffix in suffixes}
                q = stored.unpack({suffix: source[name] for suffix, name in names.items()}, spec.format, shape)
                assert torch.equal(codes.view(torch.uint8), q.codes.view(torch.uint8)), module
                assert (scales is None) == (q.scales is None)
                assert scales is None or torch.equal(scales, q.scales), module
                seen |= set(names.values())
    assert set(tensors) == set(source) - seen  # all others keep their names
    assert all(torch.equal(tensors[name], source[name]) for name in tensors)


@pytest.mark.parametrize("model", TINY)
def test_the_packed_directory_says_what_it_is(model: str, quantized: Call, packed: Call) -> None:
    source, output = quantized(model, "w4afp8"), packed(model, "w4afp8")
    config = json.loads((output / "config.json").read_text())
    block = config.pop("quantization_config")
    original = json.loads((source / "config.json").read_text())
    assert block["source"] == original.pop("quantization_config")
    assert (block["quant_method"], block["target"], block["scheme"]) == ("tilewright", "cpu", "w4afp8")
    assert config == original
    header = read_header(output / "model.safetensors")
    assert header.metadata["tilewright.packed"] == "1"
    assert header.metadata["tilewright.scheme"] == "w4afp8"
    assert json.loads(header.metadata["tilewright.cut"]) == {"tp": [0, 1], "ep": [0, 1]}
    assert all(entry.start % 64 == 0 for entry in header.entries.values() if entry.spec.nbytes % 64 == 0)
    modules = modules_of(output)
    assert modules["model.layers.2.mlp.experts.w13"].shape == (8, 256, 256)
    assert modules["model.layers.2.mlp.experts.w13"].layout.id == "cpu-vnni-int4"
    assert modules["model.layers.2.self_attn.o_proj"].layout.id == "cpu-vnni-fp8"
    assert modules["lm_head"].layout.id == "cpu-vnni-bf16"


def test_every_source_tensor_has_one_fate(quantized: Call, plan: Callable[[Path], Plan]) -> None:
    source = quantized("tiny-deepseek-v3", "w4afp8")
    made = plan(source)
    assert set(made.fates) == set(load_file(source / "model.safetensors"))
    assert {name for fate in made.fates.values() for name in fate.outputs} == set(made.tensors)
    assert "router" in made.fates["model.layers.1.mlp.gate.weight"].reason
    assert made.fates["model.layers.1.mlp.gate.e_score_correction_bias"].kind == "copied"
    assert made.fates["model.layers.1.mlp.experts.3.up_proj.weight"].outputs == (
        "model.layers.1.mlp.experts.w13.weight",
        "model.layers.1.mlp.experts.w13.weight_zero_point",
        "model.layers.1.mlp.experts.w13.weight_scale",
    )


def test_biases_become_fp32(write: Call, pack: Call) -> None:
    bias = random(40, seed=2)
    output = pack(
        write({"model.layers.0.self_attn.q_proj.weight": random(40, 72), "model.layers.0.self_attn.q_proj.bias": bias})
    )
    tensors = load_file(output / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.bias"].dtype == torch.float32
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.bias"], bias.float())
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (64, 96)


def test_float16_is_rounded_and_float32_stays(write: Call, pack: Call, plan: Callable[[Path], Plan]) -> None:
    half, single = random(32, 64, dtype=torch.float16), random(32, 64, dtype=torch.float32)
    source = write({"model.layers.0.mlp.up_proj.weight": half, "model.layers.0.mlp.down_proj.weight": single})
    made = plan(source)
    assert made.notes == ("model.layers.0.mlp.up_proj: float16 is rounded to bf16, which the kernels read",)
    output = pack(source)
    tensors = load_file(output / "model.safetensors")
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], single)
    spec = modules_of(output)["model.layers.0.mlp.up_proj"]
    q = spec.layout.unpack({"weight": tensors["model.layers.0.mlp.up_proj.weight"]}, FORMATS["bf16"], (32, 64))
    assert torch.equal(q.codes, half.to(torch.bfloat16))


def test_a_tied_head_is_packed_once(write: Call, pack: Call, plan: Callable[[Path], Plan]) -> None:
    embedding = {"model.embed_tokens.weight": random(96, 64)}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    tied = write(embedding, tie_word_embeddings=True, **config)
    tensors = load_file(pack(tied) / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], embedding["model.embed_tokens.weight"])
    assert tensors["lm_head.weight"].shape == (96, 64)
    assert "stored twice" in plan(tied).notes[0]
    refused = plan(write(embedding, tie_word_embeddings=False, **config)).rejects
    assert "not tied" in str(refused[0])


def test_experts_of_odd_sizes(write: Call, pack: Call) -> None:
    stack = "model.layers.0.mlp.experts"
    source = experts(stack, 3, 40, 72)
    output = pack(write(source, hidden_size=72))
    tensors = load_file(output / "model.safetensors")
    assert tensors[f"{stack}.w13.weight"].shape == (3, 128, 96)
    assert tensors[f"{stack}.w2.weight"].shape == (3, 96, 64)
    spec = modules_of(output)[f"{stack}.w13"]
    codes = spec.layout.unpack({"weight": tensors[f"{stack}.w13.weight"]}, spec.format, spec.shape, 2).codes
    assert torch.equal(codes[2, :40], source[f"{stack}.2.gate_proj.weight"])
    assert torch.equal(codes[2, 40:], source[f"{stack}.2.up_proj.weight"])


def test_mixtral_names(write: Call, pack: Call) -> None:
    stack = "model.layers.0.block_sparse_moe.experts"
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    plain = experts(stack, 2, 32, 64)
    renamed = {}
    for name, tensor in plain.items():
        for ours, theirs in names.items():
            if ours in name:
                renamed[name.replace(ours, theirs)] = tensor
    output = pack(write(renamed, model_type="mixtral"))
    assert modules_of(output)[f"{stack}.w13"].sources == (f"{stack}.{{}}.w1", f"{stack}.{{}}.w3")


STACK = "model.layers.0.mlp.experts"
QUERY = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "a projection is missing": (
        {name: tensor for name, tensor in experts(STACK, 2, 32, 64).items() if "1.up_proj" not in name},
        "5 matrices (down, gate, up) are not experts 0, 1, ... with gate, up and down each",
    ),
    "an expert is missing": (
        {name: tensor for name, tensor in experts(STACK, 3, 32, 64).items() if "experts.1." not in name},
        "6 matrices",
    ),
    "experts differ": (
        experts(STACK, 2, 32, 64) | {f"{STACK}.1.up_proj.weight": random(32, 64, dtype=torch.float16)},
        "experts of different kinds cannot be stacked: bf16 [32, 64], bf16 [64, 32], fp16 [32, 64]",
    ),
    "a scale per tensor": (
        {f"{QUERY}.weight": random(256, 256).to(torch.float8_e4m3fn), f"{QUERY}.weight_scale": torch.tensor(1.0)},
        "no packed layout holds per-tensor FP8",
    ),
    "experts in one tensor": (
        {f"{STACK}.gate_up_proj": random(2, 96, 64).float(), f"{STACK}.down_proj": random(2, 64, 48).float()},
        "experts stacked in one tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, write: Call, plan: Callable[[Path], Plan]) -> None:
    tensors, reason = REFUSED[case]
    assert any(reason in str(reject) for reject in plan(write(tensors)).rejects)


def test_a_packed_directory_is_not_packed_again(packed: Call, plan: Callable[[Path], Plan]) -> None:
    (reject,) = plan(packed("tiny-qwen3-moe", "none")).rejects
    assert reject.reason == "is packed already"
    assert "--unpack" in str(reject.hint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["codes", "scales", "bias", "bf16", "fp16"])
def test_what_is_not_finite_is_named(where: str, value: float, write: Call, pack: Call) -> None:
    module = "model.layers.0.mlp.up_proj"
    given = {"codes": random(200, 64), "scales": torch.full((2, 1), 0.5), "bias": torch.ones(200)}
    names = {"codes": "weight", "scales": "weight_scale_inv", "bias": "bias"}
    if where in {"bf16", "fp16"}:
        given = {"codes": random(200, 64, dtype=torch.bfloat16 if where == "bf16" else torch.float16)}
    bad = given[where if where in given else "codes"]
    index = [size - 1 for size in bad.shape]
    bad[tuple(index)] = value
    if len(given) > 1:
        given["codes"] = given["codes"].to(torch.float8_e4m3fn)
    if where == "codes":  # which have no infinity, but two NaNs
        given[where].view(torch.uint8)[tuple(index)] = 0x7F if value == torch.inf else 0xFF
    shown = "nan" if where == "codes" else value
    name = re.escape(f"{module}.{names.get(where, 'weight')}{index} is {shown}; only finite")
    with pytest.raises(SchemeError, match=name):
        pack(write({f"{module}.{names[kind]}": tensor for kind, tensor in given.items()}))
