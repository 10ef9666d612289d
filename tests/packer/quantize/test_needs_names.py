"""Public reports about what is left out or changed by mistake (needs.md groups E and F), one test per row."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

Make = Callable[..., Any]
LAYER = "model.layers.0"
CONFIG = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 256}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def everything() -> dict[str, torch.Tensor]:
    """Two layers, a third one for MTP, and every odd tensor that real checkpoints hold."""
    linears = {f"model.layers.{layer}.self_attn.o_proj.weight": normal(256, 256) for layer in range(3)}
    return linears | {
        "mtp.fc.weight": normal(256, 512),
        f"{LAYER}.scalar": torch.tensor(1.5),
        f"{LAYER}.empty.weight": torch.empty(0, 64, dtype=torch.bfloat16),
        f"{LAYER}.ids": torch.arange(7),
        f"{LAYER}.linear_attn.conv1d.weight": normal(96, 1, 4),
        f"{LAYER}.linear_attn.A_log": torch.randn(32),
    }


@pytest.mark.parametrize("mtp", ["convert", "keep", "drop"])
def test_rows_62_to_65_o5_nothing_disappears(mtp: str, make_checkpoint: Make, convert: Make) -> None:
    tensors = everything()
    config = CONFIG | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    done = convert(make_checkpoint(tensors, config), "int8", mtp=mtp)
    assert set(done.plan.fates) == set(tensors)
    for name in (name for name in tensors if name.startswith(LAYER) and "o_proj" not in name):
        assert done.tensors[name].dtype == tensors[name].dtype
        assert done.tensors[name].shape == tensors[name].shape
        assert torch.equal(done.tensors[name], tensors[name])
    extra = "model.layers.2.self_attn.o_proj"
    listed = done.plan.config["quantization_config"]["ignore"]
    kinds = {"convert": "quantized", "keep": "copied", "drop": "dropped"}
    assert done.plan.fates[f"{extra}.weight"].kind == kinds[mtp]
    assert done.plan.fates["mtp.fc.weight"].kind == ("dropped" if mtp == "drop" else "copied")
    assert (extra in listed) == (mtp == "keep")
    assert ("mtp.fc" in listed) == (mtp != "drop")
    assert done.plan.config["num_nextn_predict_layers"] == (0 if mtp == "drop" else 1)


def test_row_62_an_announced_layer_that_is_absent_is_noted(tiny_model: Any, plan: Make) -> None:
    announced = "num_nextn_predict_layers" in tiny_model.config
    assert (
        any("MTP layer(s) that the files do not hold" in note for note in plan(tiny_model, "int8").notes) == announced
    )


@pytest.mark.parametrize("wrapper", ["visual", "model.visual", "vision_tower", "vision_model", "model.vision_tower"])
def test_rows_66_and_67_vision_parts_are_left_alone(wrapper: str, make_checkpoint: Make, convert: Make) -> None:
    vision = {
        f"{wrapper}.blocks.0.attn.q_proj.weight": normal(128, 128),
        f"{wrapper}.merger.up_proj.weight": normal(8, 8),
    }
    done = convert(make_checkpoint(vision | {f"{LAYER}.mlp.up_proj.weight": normal(128, 128)}), "int8")
    for name, tensor in vision.items():
        assert torch.equal(done.tensors[name], tensor)
        assert name.removesuffix(".weight") in done.plan.config["quantization_config"]["ignore"]


def test_row_66_routers_by_every_name(make_checkpoint: Make, convert: Make) -> None:
    routers = [f"{LAYER}.{n}" for n in ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "feed_forward.router")]
    routers += [f"{LAYER}.mlp.shared_expert_gate", f"{LAYER}.router.proj"]
    tensors = {f"{name}.weight": normal(8, 256) for name in routers}
    done = convert(make_checkpoint(tensors | {f"{LAYER}.mlp.gate_proj.weight": normal(256, 256)}), "block-fp8")
    assert all(done.tensors[f"{name}.weight"].dtype == torch.bfloat16 for name in routers)
    assert done.tensors[f"{LAYER}.mlp.gate_proj.weight"].dtype == torch.float8_e4m3fn


def test_row_69_biases_survive(make_checkpoint: Make, convert: Make) -> None:
    bias = normal(256)
    tensors = {f"{LAYER}.self_attn.q_proj.weight": normal(256, 256), f"{LAYER}.self_attn.q_proj.bias": bias}
    assert torch.equal(convert(make_checkpoint(tensors), "int8").tensors[f"{LAYER}.self_attn.q_proj.bias"], bias)


def test_row_74_include_and_exclude_decide_the_final_files(tiny_model: Any, convert: Make) -> None:
    done = convert(tiny_model, "int8", include=("lm_head",), exclude=("layers.0.self_attn",))
    assert done.tensors["lm_head.weight"].dtype == torch.int8
    listed = done.plan.config["quantization_config"]["ignore"]
    assert "lm_head" not in listed
    kept = {n for n, t in done.tensors.items() if "layers.0.self_attn" in n and t.dim() == 2}
    assert kept
    assert all(done.tensors[name].dtype == torch.bfloat16 for name in kept)
    assert {name.removesuffix(".weight") for name in kept} <= set(listed)


def test_row_76_both_paths_of_a_wrapped_module_are_listed(make_checkpoint: Make, convert: Make) -> None:
    tensors = {"model.language_model.layers.0.mlp.gate.weight": normal(8, 64)}
    tensors["model.language_model.layers.0.mlp.experts.0.up_proj.weight"] = normal(64, 64)
    listed = convert(make_checkpoint(tensors), "block-fp8").plan.config["quantization_config"]["modules_to_not_convert"]
    assert {"model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate"} == set(listed)


def test_row_77_lists_are_plain_full_paths(tiny_model: Any, plan: Make) -> None:
    for scheme in ("block-fp8", "int8", "int4"):
        block = plan(tiny_model, scheme).config["quantization_config"]
        listed = block.get("ignore", block.get("modules_to_not_convert"))
        assert len(listed) == len(set(listed))
        assert all(f"{path}.weight" in tiny_model.files for path in listed)


@pytest.mark.parametrize(
    "parts", [("q_proj", "k_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3")]
)
def test_row_78_part_of_a_merged_layer_is_warned_about(
    parts: tuple[str, str], make_checkpoint: Make, plan: Make
) -> None:
    stem = f"{LAYER}.block_sparse_moe.experts.0" if "w1" in parts else f"{LAYER}.mlp"
    source = make_checkpoint({f"{stem}.{part}.weight": normal(128, 128) for part in parts})
    assert not plan(source, "int8").notes
    notes = plan(source, "int8", exclude=(parts[0],)).notes
    assert any(f"{parts[1]} quantized but {parts[0]} not; engines merge them" in note for note in notes)
    assert "engines merge them" in str(plan(source, "int8", exclude=(parts[0],), strict=True).rejects)


def test_rows_79_and_80_exactly_one_block_at_the_top(make_checkpoint: Make, plan: Make) -> None:
    stale = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    nested = {"text_config": {"hidden_size": 256, "quantization_config": stale, "odd": [1, {"deep": None}]}}
    config = CONFIG | nested | {"compression_config": stale, "unknown_key": {"kept": True}}
    written = plan(make_checkpoint({f"{LAYER}.mlp.up_proj.weight": normal(128, 128)}, config), "int8").config
    assert json.dumps(written).count("quant_method") == 1
    assert written["quantization_config"]["quant_method"] == "w8a8_int8"
    expected = {key: value for key, value in config.items() if key not in {"compression_config", "text_config"}}
    expected["text_config"] = {"hidden_size": 256, "odd": [1, {"deep": None}]}
    assert {key: value for key, value in written.items() if key != "quantization_config"} == expected


def test_row_80_stale_metadata_files_are_not_copied(make_checkpoint: Make, tmp_path: Any) -> None:
    names = ("mlp.up_proj", *(f"mlp.experts.0.{kind}_proj" for kind in ("gate", "up", "down")))
    source = make_checkpoint({f"{LAYER}.{name}.weight": normal(128, 128) for name in names})
    for name in ("hf_quant_config.json", "quant_cfg.json", "chat_template.jinja"):
        (source.root / name).write_text("{}")
    checkpoint = open_checkpoint(source.root)
    for scheme in ("int8", "w4afp8"):
        output = tmp_path / f"out-{scheme}"
        execute(plan_quantize(checkpoint, QuantizeOptions(scheme)), checkpoint, output)
        assert (output / "chat_template.jinja").exists()
        assert (output / "quant_cfg.json").exists() == (scheme == "w4afp8")
        if scheme == "w4afp8":
            assert "MIXED_PRECISION" in (output / "hf_quant_config.json").read_text()


def test_w4afp8_refuses_excluded_linears(make_checkpoint: Make, plan: Make) -> None:
    names = [*(f"self_attn.{p}" for p in "qkvo"), *(f"mlp.experts.0.{kind}" for kind in ("gate", "up", "down"))]
    tensors = {f"{LAYER}.{name}_proj.weight": normal(256, 256) for name in names}
    made = plan(make_checkpoint(tensors), "w4afp8", exclude=("o_proj",))
    (reject,) = made.rejects
    assert reject.name == f"{LAYER}.self_attn.o_proj.weight"
    assert "--format compressed-tensors" in str(reject.hint)


def test_nothing_to_quantize_refuses(make_checkpoint: Make, plan: Make) -> None:
    assert "nothing would be quantized" in str(plan(make_checkpoint({"model.norm.weight": normal(64)}), "int8").rejects)


def test_a_draft_model_of_the_mtp_layer(make_checkpoint: Make, convert: Make, plan: Make) -> None:
    layer = "model.layers.2"
    own = {f"{layer}.self_attn.o_proj.weight": normal(256, 256), f"{layer}.eh_proj.weight": normal(256, 512)}
    own |= {f"{layer}.enorm.weight": normal(256), f"{layer}.mlp.experts.0.up_proj.weight": normal(256, 256)}
    shared = {f"{layer}.embed_tokens.weight": normal(64, 256), f"{layer}.shared_head.head.weight": normal(64, 256)}
    rest = {f"model.layers.{n}.self_attn.o_proj.weight": normal(256, 256) for n in range(2)}
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 256}
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    source = make_checkpoint(own | shared | rest, config)
    done = convert(source, "w4afp8", mtp="draft")
    whole = convert(source, "w4afp8").tensors
    expected = {
        name.replace(layer, "model.layers.0"): tensor
        for name, tensor in whole.items()
        if name.startswith(layer) and name not in shared
    }
    assert set(done.tensors) == set(expected)
    assert all(torch.equal(done.tensors[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items())
    assert "model.layers.0.mlp.experts.0.w3.input_scale" in done.tensors
    assert done.plan.config["architectures"] == ["DeepseekV3ForCausalLMNextN"]
    assert done.plan.config["num_hidden_layers"] == 1
    assert done.plan.config["num_nextn_predict_layers"] == 1
    assert done.plan.config["quantization_config"]["modules_to_not_convert"] == ["model.layers.0.eh_proj"]
    assert {done.plan.fates[name].kind for name in (*shared, *rest)} == {"dropped"}
    without = make_checkpoint(rest, config)
    assert "needs exactly one layer behind the last regular one" in str(plan(without, "int8", mtp="draft").rejects)


@pytest.mark.parametrize("stated", [5, "LlamaForCausalLM", [5], None])
def test_architectures_that_are_no_names(stated: Any, make_checkpoint: Make, convert: Make) -> None:
    config = CONFIG | {"architectures": stated}
    done = convert(make_checkpoint({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}, config), "int8")
    assert done.tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
