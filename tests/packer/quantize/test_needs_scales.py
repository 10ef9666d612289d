"""Public reports about shapes, blocks and scales (needs.md groups A and B), one test per row: what must not happen."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.kernels.layouts import LAYOUTS
from tilewright.packer.checkpoint import detect_weights
from tilewright.packer.engine.job import Destination
from tilewright.packer.pack.parallel import tensor_parallel
from tilewright.packer.schemes import SCHEMES
from tilewright.packer.summary import summarize

Make = Callable[..., Any]
LAYER = "model.layers.0"
CONFIG = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 256}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def degrees(done: Any, config: dict[str, Any]) -> dict[int, str | None]:
    weights = detect_weights(done.plan.tensors, done.plan.config).weights
    return {degree.size: degree.reason for degree in tensor_parallel(weights, config)}


def test_row_1_576_rows_convert(make_checkpoint: Make, convert: Make) -> None:
    done = convert(make_checkpoint({f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": normal(576, 2048)}), "block-fp8")
    assert done.tensors[f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 2048)
    assert done.tensors[f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 16)


@pytest.mark.parametrize("heads", [0, -1])
def test_numbers_of_heads_that_are_none_leave_the_shapes_to_decide(
    make_checkpoint: Make, convert: Make, heads: int
) -> None:
    done = convert(make_checkpoint({f"{LAYER}.self_attn.k_proj.weight": normal(256, 128)}), "block-fp8")
    found = degrees(done, {"num_key_value_heads": heads})
    assert found[2] is None
    assert "256 rows / 4 = 64" in str(found[4])


def test_row_2_no_padding_on_disk(make_checkpoint: Make, convert: Make) -> None:
    done = convert(make_checkpoint({f"{LAYER}.mlp.up_proj.weight": normal(4544, 64)}), "block-fp8")
    assert done.tensors[f"{LAYER}.mlp.up_proj.weight"].shape == (4544, 64)
    assert done.tensors[f"{LAYER}.mlp.up_proj.weight_scale_inv"].shape == (36, 1)


def test_rows_3_and_4_legal_degrees_name_tensor_and_numbers(make_checkpoint: Make, convert: Make) -> None:
    tensors = {f"{LAYER}.mlp.shared_experts.gate_proj.weight": normal(512, 256)}
    found = degrees(convert(make_checkpoint(tensors, CONFIG), "block-fp8"), CONFIG)
    assert found[2] is None
    assert found[4] is None
    assert found[8] == f"{LAYER}.mlp.shared_experts.gate_proj: 512 rows / 8 = 64, no multiple of 128"


def test_row_5_gate_and_up_are_judged_separately(make_checkpoint: Make, convert: Make) -> None:
    stem = f"{LAYER}.mlp.experts"
    tensors = {f"{stem}.gate_up_proj": normal(2, 640, 256), f"{stem}.down_proj": normal(2, 256, 320)}
    done = convert(make_checkpoint(tensors, CONFIG), "block-fp8")
    assert done.tensors[f"{stem}.0.gate_proj.weight_scale_inv"].shape == (3, 2)
    assert "320 rows / 2 = 160" in str(degrees(done, CONFIG)[2])


@pytest.mark.parametrize(("scheme", "form"), [(s.id, f) for s in SCHEMES.values() for f in s.checkpoint_formats])
def test_rows_17_to_22_every_stored_scale_is_finite_and_positive(
    scheme: str, form: str, make_checkpoint: Make, convert: Make
) -> None:
    weight = torch.randn(256, 256) * torch.logspace(-44, 30, 256)[:, None]  # from subnormal to huge
    weight[7] = 0
    modules = [f"{LAYER}.self_attn.o_proj", *(f"{LAYER}.mlp.experts.0.{p}_proj" for p in ("gate", "up", "down"))]
    done = convert(make_checkpoint({f"{m}.weight": weight for m in modules}), scheme, checkpoint_format=form)
    scales = [t.float() for name, t in done.tensors.items() if "scale" in name]
    assert scales
    assert all(bool((torch.isfinite(scale) & (scale > 0)).all()) for scale in scales)


def test_row_20_a_channel_around_1e_6_survives(make_checkpoint: Make, convert: Make) -> None:
    weight = normal(64, 256) * 1e-6
    done = convert(make_checkpoint({f"{LAYER}.mlp.up_proj.weight": weight.half().float()}), "int8")
    assert (done.tensors[f"{LAYER}.mlp.up_proj.weight"].abs().amax(1) == 127).all()


def test_row_23_one_name_per_format(make_checkpoint: Make, convert: Make) -> None:
    source = make_checkpoint({f"{LAYER}.mlp.up_proj.weight": normal(128, 128)})
    suffix = {"native": "weight_scale_inv", "compressed-tensors": "weight_scale"}
    for form, name in suffix.items():
        tensors = convert(source, "block-fp8", checkpoint_format=form).tensors
        assert {key.rpartition(".")[2] for key in tensors} == {"weight", name}


def test_row_30_int8_scales_have_two_dimensions(make_checkpoint: Make, convert: Make) -> None:
    done = convert(make_checkpoint({f"{LAYER}.mlp.up_proj.weight": normal(48, 64)}), "int8")
    assert done.tensors[f"{LAYER}.mlp.up_proj.weight_scale"].shape == (48, 1)


def test_row_33_each_logical_part_has_scales_of_its_own(make_checkpoint: Make, convert: Make) -> None:
    quiet, loud = normal(64, 128), normal(64, 128) * 1000
    alone = convert(make_checkpoint({f"{LAYER}.self_attn.q_proj.weight": quiet}), "block-fp8").tensors
    tensors = {f"{LAYER}.self_attn.q_proj.weight": quiet, f"{LAYER}.self_attn.k_proj.weight": loud}
    beside = convert(make_checkpoint(tensors), "block-fp8").tensors
    name = f"{LAYER}.self_attn.q_proj.weight_scale_inv"
    assert torch.equal(alone[name], beside[name])


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_row_35_values_are_scaled_once(scheme: str, tiny_model: Any, convert: Make) -> None:
    done = convert(tiny_model, scheme)
    form = next(iter(SCHEMES[scheme].checkpoint_formats.values()))
    for task in done.plan.tasks:
        name = task.sources[0].name
        if done.plan.fates[name].kind != "quantized":
            continue
        weight = tiny_model.tensor(task.sources[0]).float()
        target = form.target("expert" if ".experts." in name else "linear", 128)
        suffixes = target.checkpoint_layout.specs(target.weight_format, tuple(weight.shape))
        found = {s: done.tensors[f"{name.removesuffix('.weight')}.{s}"] for s in suffixes}
        back = LAYOUTS[target.layout].unpack(found, target.weight_format, tuple(weight.shape)).dequantize()
        ratio = float((back * weight).sum() / weight.square().sum())
        assert ratio == pytest.approx(1, abs=0.02), name


def test_sizes_of_the_summary_are_those_of_the_plan(tiny_model: Any, plan: Make) -> None:
    made = plan(tiny_model, "int8")
    one = Destination(Path("out"), "", made, (), "", finished=False)
    needs = {"workers": 1, "peak_memory": 1, "disk_needed": 1, "disk_free": 1}
    summary = summarize(SimpleNamespace(checkpoint=tiny_model, **needs), one)  # type: ignore[arg-type]
    assert sum(group.bytes_before for group in summary.groups) == summary.bytes_before
    assert sum(group.bytes_after for group in summary.groups) == summary.bytes_after
    assert sum(group.count for group in summary.groups) == len(made.fates)
    assert summary.weights == sum(tiny_model.spec(name).nbytes // 2 for name in made.fates if "bias" not in name) + (
        sum(tiny_model.spec(name).nbytes // 4 for name in made.fates if "bias" in name)
    )
    assert "{0-7}.up_proj.weight" in summary.table()
