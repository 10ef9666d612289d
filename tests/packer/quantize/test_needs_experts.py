"""Public reports about W4AFP8 and stacked experts (needs.md groups C and D), one test per row."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.kernels.errors import TilewrightError
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.schemes import SCHEMES

Make = Callable[..., Any]
LAYER = "model.layers.0"
STEM = f"{LAYER}.mlp.experts"
CONFIG = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def stacks() -> dict[str, torch.Tensor]:
    return {f"{STEM}.gate_up_proj": normal(4, 768, 256), f"{STEM}.down_proj": normal(4, 256, 384)}


@pytest.mark.parametrize("group", [32, 64])
def test_row_37_w4afp8_has_no_other_group(group: int, make_checkpoint: Make, plan: Make) -> None:
    with pytest.raises(TilewrightError, match=f"scheme w4afp8 has no group size {group}"):
        plan(make_checkpoint(stacks()), "w4afp8", group_size=group)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_row_37_the_config_states_the_group(group: int, make_checkpoint: Make, convert: Make) -> None:
    done = convert(make_checkpoint(stacks()), "int4", group_size=group)
    weights = done.plan.config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["group_size"] == group
    assert done.tensors[f"{STEM}.0.up_proj.weight_scale"].shape == (384, 256 // group)


def test_row_38_every_expert_has_every_companion(make_checkpoint: Make, convert: Make) -> None:
    tensors = convert(make_checkpoint(stacks()), "w4afp8").tensors
    for expert in range(4):
        scales = [tensors[f"{STEM}.{expert}.{name}.input_scale"] for name in ("w1", "w3", "w2")]
        assert torch.equal(scales[0], scales[1])  # loaders refuse gate and up that differ
        assert all(scale.dtype == torch.bfloat16 and scale.shape == (1,) for scale in scales)


def test_row_39_mtp_of_w4afp8_is_what_the_config_says(make_checkpoint: Make, convert: Make, plan: Make) -> None:
    tensors = {f"model.layers.1.{name}": normal(256, 256) for name in ("eh_proj.weight", "self_attn.o_proj.weight")}
    tensors |= {f"model.layers.1.mlp.experts.0.{p}_proj.weight": normal(256, 256) for p in ("gate", "up", "down")}
    tensors[f"{LAYER}.self_attn.o_proj.weight"] = normal(256, 256)
    source = make_checkpoint(tensors, CONFIG | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1})
    done = convert(source, "w4afp8")
    assert done.tensors["model.layers.1.mlp.experts.0.up_proj.weight"].shape == (256, 128)
    assert done.tensors["model.layers.1.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert done.tensors["model.layers.1.eh_proj.weight"].dtype == torch.bfloat16
    assert "engines that read this format take every Linear as FP8" in str(plan(source, "w4afp8", mtp="keep").rejects)


def test_rows_40_and_41_metadata_for_further_engines(make_checkpoint: Make, convert: Make) -> None:
    tensors = stacks() | {f"{LAYER}.self_attn.{p}_proj.weight": normal(256, 256) for p in "qkvo"}
    plan = convert(make_checkpoint(tensors), "w4afp8").plan
    assert plan.config["quantization_config"]["quant_method"] == "w4afp8"
    hub = json.loads(plan.extra_files["hf_quant_config.json"])
    assert hub == {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}}
    assert json.loads(plan.extra_files["quant_cfg.json"])["quantized_layers"] == {
        STEM: {"quant_algo": "W4A8_AWQ"},
        f"{LAYER}.self_attn.qkv_proj": {"quant_algo": "FP8_BLOCK_SCALES"},
        f"{LAYER}.self_attn.o_proj": {"quant_algo": "FP8_BLOCK_SCALES"},
    }


def test_row_45_odd_columns_stay_in_16_bits_with_the_reason(make_checkpoint: Make, convert: Make) -> None:
    tensors = {f"{LAYER}.mlp.down_proj.weight": normal(64, 129), f"{LAYER}.mlp.up_proj.weight": normal(64, 128)}
    done = convert(make_checkpoint(tensors), "int4")
    assert done.plan.fates[f"{LAYER}.mlp.down_proj.weight"].reason == "K = 129 is not a multiple of group 128"
    assert f"{LAYER}.mlp.down_proj" in done.plan.config["quantization_config"]["ignore"]
    assert any("K = 129 stay in 16 bits" in note and "no group size divides" in note for note in done.plan.notes)
    tensors = {f"{LAYER}.mlp.{name}_proj.weight": normal(64, k) for name, k in (("up", 576), ("down", 1536))}
    notes = convert(make_checkpoint(tensors), "int4").plan.notes
    assert any("K = 576 stay in 16 bits" in note and "--group-size 64 would" in note for note in notes)
    assert not convert(make_checkpoint(tensors), "int4", group_size=64).plan.notes


def test_row_46_unsupported_combinations_are_refused() -> None:
    for scheme, options in (
        ("int4", {"group_size": 16}),
        ("int8", {"group_size": 128}),
        ("int4", {"checkpoint_format": "native"}),
    ):
        with pytest.raises(TilewrightError, match=f"scheme {scheme} has no|--group-size: `16` is not one of"):
            QuantizeOptions(scheme, **options).resolved()


def test_rows_50_to_52_no_expert_is_left_out(make_checkpoint: Make, convert: Make) -> None:
    for scheme in SCHEMES:
        done = convert(make_checkpoint(stacks()), scheme)
        assert {fate.kind for fate in done.plan.fates.values()} == {"quantized"}
        assert all(len(fate.outputs) >= 8 for fate in done.plan.fates.values())


def test_row_54_the_list_never_holds_what_is_quantized(tiny_model: Any, convert: Make) -> None:
    for scheme in SCHEMES.values():
        for form in scheme.checkpoint_formats:
            done = convert(tiny_model, scheme.id, checkpoint_format=form)
            block = done.plan.config["quantization_config"]
            listed = set(block.get("ignore", block.get("modules_to_not_convert")))
            quantized = {n.removesuffix(".weight") for n, f in done.plan.fates.items() if f.kind == "quantized"}
            assert not listed & quantized
            assert quantized | listed == {
                name.removesuffix(".weight") for name in tiny_model.files if len(tiny_model.spec(name).shape) == 2
            }


def test_row_59_a_scale_is_never_taken_for_a_weight(make_checkpoint: Make, convert: Make) -> None:
    done = convert(make_checkpoint(stacks()), "block-fp8")
    again = convert(make_checkpoint(done.tensors, done.plan.config), "int8")
    assert not any("scale_inv" in name for name in again.tensors)
    assert len(again.tensors) == 24


def test_row_61_unmatched_names_stop_a_strict_run(make_checkpoint: Make, plan: Make, convert: Make) -> None:
    tensors = {f"{LAYER}.mlp.up_proj.weight": normal(128, 128), f"{LAYER}.mixer.strange.weight": normal(64, 64)}
    source = make_checkpoint(tensors)
    assert "no architecture rule knows this name" in str(plan(source, "int8", strict=True).rejects)
    done = convert(source, "int8")
    assert done.plan.fates[f"{LAYER}.mixer.strange.weight"].kind == "copied"
    assert f"{LAYER}.mixer.strange" in done.plan.config["quantization_config"]["ignore"]
    included = convert(source, "int8", include=("mixer.strange",), strict=True)
    assert included.tensors[f"{LAYER}.mixer.strange.weight"].dtype == torch.int8
