"""Experts in 3-D tensors: every order gives the codes that separate experts give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.packer.plan import Source

Make = Callable[..., Any]
STEM = "model.layers.0.mlp.experts"
HIDDEN, INNER, EXPERTS = 256, 384, 3


def config(model_type: str | None = "qwen3_moe", hidden: int | None = HIDDEN) -> dict[str, Any]:
    fields = {"model_type": model_type, "hidden_size": hidden, "architectures": ["XForCausalLM"]}
    return {key: value for key, value in fields.items() if value is not None}


def matrices(inner: int = INNER, hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(inner)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{STEM}.{e}.{name}.weight": normal(*shape) for e in range(EXPERTS) for name, shape in shapes.items()}


def stack(parts: dict[str, torch.Tensor], order: str, transposed: bool) -> dict[str, torch.Tensor]:
    gate, up, down = (
        torch.stack([parts[f"{STEM}.{e}.{name}.weight"] for e in range(EXPERTS)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    if order == "interleaved":
        merged = torch.stack((gate, up), 2).flatten(1, 2)
    else:
        merged = torch.cat((gate, up) if order == "gate-up" else (up, gate), 1)
    if transposed:
        merged, down = merged.transpose(1, 2), down.transpose(1, 2)
    return {f"{STEM}.gate_up_proj": merged.contiguous(), f"{STEM}.down_proj": down.contiguous()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", ["gate-up", "up-gate", "interleaved"])
@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4", "w4afp8"])
def test_every_order_equals_separate(
    scheme: str, order: str, transposed: bool, make_checkpoint: Make, convert: Make
) -> None:
    parts = matrices()
    expected = convert(make_checkpoint(parts, config()), scheme).tensors
    done = convert(make_checkpoint(stack(parts, order, transposed), config()), scheme, experts_order=order)
    assert_same(done.tensors, expected)
    assert {fate.kind for fate in done.plan.fates.values()} == {"quantized"}


@pytest.mark.parametrize(
    ("model_type", "order", "transposed"),
    [
        ("gpt_oss", "interleaved", True),
        ("llama4", "gate-up", True),
        ("qwen3_vl_moe", "gate-up", True),
        ("qwen3_moe", "gate-up", False),
    ],
)
def test_families_know_their_order(
    model_type: str, order: str, transposed: bool, make_checkpoint: Make, convert: Make
) -> None:
    parts = matrices()
    expected = convert(make_checkpoint(parts, config()), "int8").tensors
    done = convert(make_checkpoint(stack(parts, order, transposed), config(model_type)), "int8")
    assert_same(done.tensors, expected)
    assert not [note for note in done.plan.notes if "gate rows" in note]


def test_gpt_oss_biases_are_cut_like_their_rows(make_checkpoint: Make, convert: Make) -> None:
    tensors = stack(matrices(), "interleaved", True)
    bias, down = torch.randn(EXPERTS, 2 * INNER).bfloat16(), torch.randn(EXPERTS, HIDDEN).bfloat16()
    tensors |= {f"{STEM}.gate_up_proj_bias": bias, f"{STEM}.down_proj_bias": down}
    done = convert(make_checkpoint(tensors, config("gpt_oss")), "int8")
    for expert in range(EXPERTS):
        assert torch.equal(done.tensors[f"{STEM}.{expert}.gate_proj.bias"], bias[expert, 0::2])
        assert torch.equal(done.tensors[f"{STEM}.{expert}.up_proj.bias"], bias[expert, 1::2])
        assert torch.equal(done.tensors[f"{STEM}.{expert}.down_proj.bias"], down[expert])
    assert done.plan.fates[f"{STEM}.gate_up_proj_bias"].kind == "copied"
    assert len(done.plan.fates[f"{STEM}.gate_up_proj_bias"].outputs) == 2 * EXPERTS


def test_square_stack_is_decided_by_its_partner(make_checkpoint: Make, convert: Make) -> None:
    parts = matrices(inner=128)  # gate_up is [EXPERTS, 256, 256]
    expected = convert(make_checkpoint(parts, config()), "int8").tensors
    for transposed in (False, True):
        source = make_checkpoint(stack(parts, "gate-up", transposed), config())
        assert_same(convert(source, "int8").tensors, expected)


def test_ambiguous_square_case_needs_a_declaration(make_checkpoint: Make, plan: Make, convert: Make) -> None:
    parts = matrices(inner=128)
    for transposed in (False, True):
        only = {name: t for name, t in stack(parts, "gate-up", transposed).items() if "gate_up" in name}
        source = make_checkpoint(only, config())
        (reject, *_) = plan(source, "int8").rejects
        assert f"{STEM}.gate_up_proj: is [3, 256, 256] with hidden_size = 256" in str(reject)
        assert "--experts-transposed" in str(reject)
        done = convert(source, "int8", experts_order="gate-up", experts_transposed=transposed)
        expected = convert(make_checkpoint({n: t for n, t in parts.items() if "down" not in n}, config()), "int8")
        assert_same(done.tensors, expected.tensors)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"experts_transposed": True}, "not transposed, as --experts-transposed says"),
        ({"hidden_size": 512}, {}, "neither side is hidden_size = 512"),
        ({"hidden_size": None}, {}, "shapes do not tell rows from columns"),
    ],
)
def test_contradictions_refuse(
    change: dict[str, Any], options: dict[str, Any], message: str, make_checkpoint: Make, plan: Make
) -> None:
    fields = {key: value for key, value in (config() | change).items() if value is not None}
    source = make_checkpoint(stack(matrices(), "gate-up", False), fields)
    assert message in "\n".join(map(str, plan(source, "int8", **options).rejects))


def test_stacks_of_one_layer_must_agree(make_checkpoint: Make, plan: Make) -> None:
    tensors = stack(matrices(), "gate-up", False)
    tensors[f"{STEM}.down_proj"] = tensors[f"{STEM}.down_proj"].transpose(1, 2)
    text = "\n".join(map(str, plan(make_checkpoint(tensors, config()), "int8").rejects))
    assert "is stored [in, out], but" in text


def test_unknown_family_is_told_which_order_was_taken(make_checkpoint: Make, convert: Make) -> None:
    source = make_checkpoint(stack(matrices(), "gate-up", False), config("brand_new"))
    assert any("gate rows are taken to come before up rows" in note for note in convert(source, "int8").plan.notes)
    notes = convert(source, "int8", experts_order="gate-up").plan.notes
    assert len(notes) == 1
    assert "model_type `brand_new` is not known" in notes[0]


def test_excluded_experts(make_checkpoint: Make, convert: Make) -> None:
    parts = matrices()
    stacked = stack(parts, "interleaved", True)
    parts["model.layers.0.self_attn.o_proj.weight"] = torch.ones(HIDDEN, HIDDEN)
    stacked["model.layers.0.self_attn.o_proj.weight"] = torch.ones(HIDDEN, HIDDEN)
    source = make_checkpoint(stacked, config("gpt_oss"))
    one = convert(source, "int8", exclude=("experts.1",))
    assert torch.equal(one.tensors[f"{STEM}.1.up_proj.weight"], parts[f"{STEM}.1.up_proj.weight"])
    assert one.tensors[f"{STEM}.2.up_proj.weight"].dtype == torch.int8
    assert f"{STEM}.1.up_proj" in one.plan.config["quantization_config"]["ignore"]
    assert any(note.startswith(f"{STEM}: ") and "engines merge them" in note for note in one.plan.notes)
    all_of_them = convert(source, "int8", exclude=("experts",))
    for name in (f"{STEM}.gate_up_proj", f"{STEM}.down_proj"):
        assert torch.equal(all_of_them.tensors[name], source.tensor(Source(name)))
    assert STEM in all_of_them.plan.config["quantization_config"]["ignore"]
    by_its_own_name = convert(source, "int8", exclude=("experts.down_proj",)).tensors
    assert by_its_own_name[f"{STEM}.0.down_proj.weight"].dtype == torch.bfloat16
    assert by_its_own_name[f"{STEM}.0.up_proj.weight"].dtype == torch.int8


def test_one_task_per_expert(make_checkpoint: Make, plan: Make) -> None:
    made = plan(make_checkpoint(stack(matrices(), "gate-up", False), config()), "int8")
    assert sorted((task.sources[0].name, task.sources[0].index) for task in made.tasks) == [
        (f"{STEM}.{name}", expert) for name in ("down_proj", "gate_up_proj") for expert in range(EXPERTS)
    ]


def test_both_spellings_of_an_experts_name(make_checkpoint: Make, convert: Make) -> None:
    parts = matrices()
    inverted = {}
    for name, tensor in parts.items():
        expert, projection = name.removeprefix(f"{STEM}.").removesuffix(".weight").split(".")
        inverted[f"{STEM}.{projection}.{expert}.weight"] = tensor
    expected = convert(make_checkpoint(parts, config()), "int8").tensors
    assert_same(convert(make_checkpoint(inverted, config()), "int8").tensors, expected)
    kept = convert(make_checkpoint(inverted, config()), "int8", exclude=("experts.0",)).tensors
    assert torch.equal(kept[f"{STEM}.0.up_proj.weight"], parts[f"{STEM}.0.up_proj.weight"])


def test_stacks_beside_separate_experts_refuse(make_checkpoint: Make, plan: Make) -> None:
    parts = matrices()
    source = make_checkpoint(parts | stack(parts, "gate-up", False), config())
    assert "which another tensor already is" in "\n".join(map(str, plan(source, "int8").rejects))
