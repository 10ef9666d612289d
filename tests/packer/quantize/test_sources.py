"""Sources that are quantized already: every encoding of the same values gives the same output."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.kernels.errors import SchemeError
from tilewright.kernels.formats import FP8, INT4_BY_GROUP
from tilewright.kernels.layouts import LAYOUTS
from tilewright.kernels.tensors import QTensor
from tilewright.packer.plan import Source
from tilewright.packer.quant_config import compressed_tensors
from tilewright.packer.quant_config.inputs import QuantConfigInputs
from tilewright.packer.schemes import SCHEMES

Make = Callable[..., Any]
MODULE = "model.layers.0.self_attn.o_proj"
OTHER = "model.layers.0.mlp.down_proj"
EXPERT = "model.layers.0.mlp.experts.0"
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def config(block: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    base = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256}
    return base | fields | ({"quantization_config": block} if block else {})


def fp8_codes(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n)).mul_(100).to(torch.float8_e4m3fn)


def power_scales(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-12, -4, shape, generator=torch.Generator().manual_seed(1)).float())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("scheme", ["block-fp8", "int8", "int4"])
def test_scale_dtypes_and_names_of_block_fp8(scheme: str, make_checkpoint: Make, convert: Make) -> None:
    codes, scales = fp8_codes(192, 384), power_scales(2, 3)
    dense = QTensor(FP8, codes, scales).dequantize()
    runs = [
        convert(
            make_checkpoint({f"{MODULE}.weight": codes, f"{MODULE}.{name}": scales.to(dtype)}, config(FP8_CONFIG)),
            scheme,
        )
        for name in ("weight_scale_inv", "weight_scale")
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    ]
    for run in runs:
        assert set(run.tensors) == set(runs[0].tensors)
        assert all(same_bytes(tensor, runs[0].tensors[name]) for name, tensor in run.tensors.items())
    if scheme == "block-fp8":
        assert same_bytes(runs[0].tensors[f"{MODULE}.weight"], codes)
        assert same_bytes(runs[0].tensors[f"{MODULE}.weight_scale_inv"], scales)
    else:
        plain = convert(make_checkpoint({f"{MODULE}.weight": dense}), scheme)
        assert all(same_bytes(tensor, plain.tensors[name]) for name, tensor in runs[0].tensors.items())


def test_o4_scale_in_another_shard(make_checkpoint: Make, convert: Make) -> None:
    tensors = {f"{MODULE}.weight": fp8_codes(256, 256), f"{MODULE}.weight_scale_inv": power_scales(2, 2)}
    apart, together = (make_checkpoint(tensors, config(FP8_CONFIG), shards=shards) for shards in (2, 1))
    assert len(set(apart.files.values())) == 2
    one, other = convert(apart, "int8"), convert(together, "int8")
    assert all(same_bytes(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1)])
def test_per_tensor_and_per_channel_fp8(shape: tuple[int, ...], make_checkpoint: Make, convert: Make) -> None:
    codes = fp8_codes(200, 256)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 0.01 + 0.001
    values = codes.float() * (scales.reshape(-1, 1) if scales.numel() > 1 else scales.reshape(()))
    block = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": scales, f"{MODULE}.input_scale": torch.tensor(0.5)}
    done = convert(make_checkpoint(tensors, config(block)), "int8")
    plain = convert(make_checkpoint({f"{MODULE}.weight": values}), "int8")
    assert all(same_bytes(tensor, plain.tensors[name]) for name, tensor in done.tensors.items())
    assert done.plan.fates[f"{MODULE}.input_scale"].kind == "dropped"


def int8_source() -> dict[str, torch.Tensor]:
    codes = torch.randint(-127, 128, (96, 256), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    return {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": torch.rand(96, 1) * 0.01 + 0.001}


def test_int8_source_keeps_its_codes_or_is_dequantized(make_checkpoint: Make, convert: Make) -> None:
    tensors = int8_source()
    source = make_checkpoint(tensors, config({"quant_method": "compressed-tensors", "format": "int-quantized"}))
    same = convert(source, "int8").tensors
    assert all(same_bytes(tensors[name], same[name]) for name in tensors)
    plain = tensors[f"{MODULE}.weight"].float() * tensors[f"{MODULE}.weight_scale"]
    expected = convert(make_checkpoint({f"{MODULE}.weight": plain}), "block-fp8").tensors
    done = convert(source, "block-fp8").tensors
    assert set(done) == set(expected)
    assert all(same_bytes(tensor, done[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("k", [1, 96, 256])
@pytest.mark.parametrize("scale", [(1,), (1, 1)])
def test_int8_with_one_output_channel_keeps_its_codes(
    k: int, scale: tuple[int, ...], make_checkpoint: Make, convert: Make
) -> None:
    codes = torch.randint(-127, 128, (1, k), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": torch.full(scale, 0.37)}
    done = convert(make_checkpoint(tensors, config({"quant_method": "w8a8_int8"})), "int8").tensors
    assert same_bytes(done[f"{MODULE}.weight"], codes)
    assert same_bytes(done[f"{MODULE}.weight_scale"], torch.full((1, 1), 0.37))


def int4_block(group: int) -> dict[str, Any]:
    return compressed_tensors.write_int4(QuantConfigInputs((), group))


def int4_source(module: str, group: int, n: int = 256, k: int = 256) -> tuple[dict[str, torch.Tensor], QTensor]:
    fmt = INT4_BY_GROUP[group]
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(n, k // group, generator=generator) * 0.01 + 0.001).bfloat16().float()
    q = QTensor(fmt, codes, scales)
    return {f"{module}.{suffix}": t for suffix, t in LAYOUTS["pack-quantized"].pack(q).items()}, q


@pytest.mark.parametrize("group", [32, 64, 128])
def test_pack_quantized_sources(group: int, make_checkpoint: Make, convert: Make) -> None:
    block = int4_block(group)
    tensors, q = int4_source(MODULE, group)
    source = make_checkpoint(tensors, config(block))
    same = convert(source, "int4", group_size=group)
    assert set(same.tensors) == set(tensors)
    assert all(same_bytes(tensors[name], same.tensors[name]) for name in tensors)
    assert not same.plan.notes
    dense = make_checkpoint({f"{MODULE}.weight": q.dequantize()})
    for scheme in ("int8", "block-fp8"):
        expected, done = convert(dense, scheme).tensors, convert(source, scheme).tensors
        assert all(same_bytes(tensor, done[name]) for name, tensor in expected.items())


def experts(group: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors |= int4_source(f"{EXPERT}.{name}", group)[0]
    return tensors


def test_int4_g128_to_w4afp8_is_a_change_of_bytes_only(make_checkpoint: Make, convert: Make) -> None:
    done = convert(make_checkpoint(experts(128), config(int4_block(128))), "w4afp8")
    _, q = int4_source(f"{EXPERT}.up_proj", 128)
    tensors = {s: done.tensors[f"{EXPERT}.up_proj.{s}"] for s in ("weight", "weight_scale_inv")}
    back = LAYOUTS["w4afp8-expert"].unpack(tensors, q.format, q.shape)
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scales, q.scales)
    assert not done.plan.notes


def test_int4_g32_to_w4afp8_is_said_to_lose(make_checkpoint: Make, convert: Make) -> None:
    done = convert(make_checkpoint(experts(32), config(int4_block(32))), "w4afp8")
    assert any("int4 group 32 -> int4-g128: int4 weights are quantized a second time" in n for n in done.plan.notes)
    _, q = int4_source(f"{EXPERT}.up_proj", 32)
    tensors = {s: done.tensors[f"{EXPERT}.up_proj.{s}"] for s in ("weight", "weight_scale_inv")}
    back = LAYOUTS["w4afp8-expert"].unpack(tensors, INT4_BY_GROUP[128], q.shape).dequantize()
    assert 0 < (back - q.dequantize()).norm() / q.dequantize().norm() < 0.2


@pytest.mark.parametrize(("scheme", "form"), [(s.id, f) for s in SCHEMES.values() for f in s.checkpoint_formats])
def test_our_own_outputs_are_sources(
    scheme: str, form: str, tiny_model: Any, make_checkpoint: Make, convert: Make
) -> None:
    first = convert(tiny_model, scheme, checkpoint_format=form)
    source = make_checkpoint(first.tensors, first.plan.config)
    again = convert(source, scheme, checkpoint_format=form)
    assert again.plan.config == first.plan.config
    assert set(again.tensors) == set(first.tensors)
    assert all(same_bytes(tensor, again.tensors[name]) for name, tensor in first.tensors.items())
    other = "int8" if scheme == "block-fp8" else "block-fp8"
    assert set(convert(source, other).tensors) == set(convert(tiny_model, other).tensors)


def test_calibrated_input_scales_are_carried_on(tiny_model: Any, make_checkpoint: Make, convert: Make) -> None:
    first = convert(tiny_model, "w4afp8")
    scales = {name: torch.rand(1).bfloat16() for name in first.tensors if name.endswith("input_scale")}
    source = make_checkpoint(first.tensors | scales, first.plan.config)
    again = convert(source, "w4afp8")
    assert all(same_bytes(tensor, again.tensors[name]) for name, tensor in scales.items())
    assert not any(name.endswith("input_scale") for name in convert(source, "int8").tensors)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
def test_missing_partners_refuse(suffix: str, make_checkpoint: Make, plan: Make) -> None:
    tensors = {f"{MODULE}.weight": fp8_codes(128, 128), f"{OTHER}.{suffix}": power_scales(1, 1)}
    text = "\n".join(map(str, plan(make_checkpoint(tensors, config(FP8_CONFIG)), "int8").rejects))
    assert f"{MODULE}.weight: is FP8 but has neither" in text
    assert f"{OTHER}.{suffix}: is a scale without its weight" in text


@pytest.mark.parametrize(
    ("tensors", "block", "message"),
    [
        ({f"{MODULE}.weight": torch.ones(8, 8)}, {"quant_method": "vptq"}, "quantized by `vptq`, which is not read"),
        ({f"{MODULE}.weight": torch.ones(8, 8)}, {"quant_method": "gptq"}, "`quantization_config.bits` is missing"),
        ({f"{MODULE}.weight": torch.ones(8, 8)}, FP8_CONFIG | {"shear": 1}, "`quantization_config.shear` is a key"),
        ({f"{MODULE}.weight": torch.ones(8, 8)}, {"quant_method": "tilewright"}, "already packed"),
        (int4_source(MODULE, 32)[0], None, "the quantization config is missing"),
        (
            int4_source(MODULE, 32)[0] | {f"{MODULE}.weight_zero_point": torch.zeros(1)},
            int4_block(32),
            "has zero points, yet the config says that it is symmetric",
        ),
        (
            int4_source(MODULE, 32)[0] | {f"{MODULE}.weight_g_idx": torch.zeros(1)},
            int4_block(32),
            "has an order of activations, yet the config does not say so",
        ),
        (
            {f"{MODULE}.weight": fp8_codes(128, 256), f"{MODULE}.weight_scale": torch.ones(3, 2)},
            FP8_CONFIG,
            "neither per tensor, per output channel nor per 128x128 block",
        ),
        (
            {f"{MODULE}.weight": fp8_codes(128, 128), f"{MODULE}.weight_scale": torch.ones(1, 1, dtype=torch.uint8)},
            FP8_CONFIG,
            "scales of dtype torch.uint8",
        ),
        (
            {f"{MODULE}.weight": torch.ones(8, 8), f"{MODULE}.weight_scale": torch.ones(1)},
            None,
            "claims that it is quantized",
        ),
        ({f"{MODULE}.weight": torch.ones(8, 8).to(torch.float8_e5m2)}, None, "is FP8 E5M2"),
        (
            {f"{MODULE}.weight": torch.ones(8, 8, dtype=torch.uint8), f"{MODULE}.weight_scale": torch.ones(8, 1)},
            {"quant_method": "modelopt"},
            "is torch.uint8 with weight_scale, which is not read",
        ),
    ],
)
def test_unreadable_sources_refuse(
    tensors: dict[str, torch.Tensor], block: dict[str, Any] | None, message: str, make_checkpoint: Make, plan: Make
) -> None:
    rejects = plan(make_checkpoint(tensors, config(block)), "block-fp8").rejects
    assert message in "\n".join(map(str, rejects))


def test_nan_code_and_infinite_scale_are_named(make_checkpoint: Make, convert: Make) -> None:
    codes = fp8_codes(128, 256)
    codes.view(torch.uint8)[5, 200] = 0xFF
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale_inv": power_scales(1, 2)}
    for scheme in ("block-fp8", "int8"):
        with pytest.raises(SchemeError, match=r"o_proj\.weight\[5, 200\] is nan"):
            convert(make_checkpoint(tensors, config(FP8_CONFIG)), scheme)
    tensors = {f"{MODULE}.weight": fp8_codes(128, 256), f"{MODULE}.weight_scale_inv": torch.tensor([[1.0, torch.inf]])}
    with pytest.raises(SchemeError, match=r"o_proj\.weight_scale_inv\[0, 1\] is inf"):
        convert(make_checkpoint(tensors, config(FP8_CONFIG)), "block-fp8")


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("scheme", ["int8", "block-fp8"])
def test_excluded_fp8_layer_keeps_bytes_scales_and_names(
    scheme: str, name: str, make_checkpoint: Make, convert: Make
) -> None:
    tensors = {}
    for module in (MODULE, OTHER):
        tensors |= {f"{module}.weight": fp8_codes(256, 256), f"{module}.{name}": power_scales(2, 2).bfloat16()}
    source = make_checkpoint(tensors, config(FP8_CONFIG))
    done = convert(source, scheme, exclude=(MODULE,))
    for suffix in ("weight", name):
        assert same_bytes(done.tensors[f"{MODULE}.{suffix}"], source.tensor(Source(f"{MODULE}.{suffix}")))
    block = done.plan.config["quantization_config"]
    listed = block["ignore"] if scheme == "int8" else block["modules_to_not_convert"]
    still_described = scheme == "block-fp8" and name == "weight_scale_inv"
    assert (MODULE in listed) is not still_described
    assert any("keeps its block 128x128 FP8" in note for note in done.plan.notes) is not still_described


def test_w4afp8_compressed_tensors_dequantizes_other_linears(make_checkpoint: Make, convert: Make) -> None:
    tensors = {f"{MODULE}.weight": fp8_codes(256, 256), f"{MODULE}.weight_scale_inv": power_scales(2, 2)}
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors |= {
            f"{EXPERT}.{name}.weight": fp8_codes(256, 256),
            f"{EXPERT}.{name}.weight_scale_inv": power_scales(2, 2),
        }
    done = convert(make_checkpoint(tensors, config(FP8_CONFIG)), "w4afp8", checkpoint_format="compressed-tensors")
    assert done.plan.fates[f"{MODULE}.weight"].kind == "dequantized"
    expected = QTensor(FP8, fp8_codes(256, 256), power_scales(2, 2)).dequantize().bfloat16()
    assert same_bytes(done.tensors[f"{MODULE}.weight"], expected)
    assert MODULE in done.plan.config["quantization_config"]["ignore"]
    assert f"{EXPERT}.up_proj.weight_packed" in done.tensors


@pytest.mark.parametrize("inner", [128, 96])
@pytest.mark.parametrize("suffix", ["scale_inv", "scale"])
def test_stacked_fp8_experts(suffix: str, inner: int, make_checkpoint: Make, convert: Make) -> None:
    stem = "model.layers.0.mlp.experts"
    gate_up = torch.stack([fp8_codes(2 * inner, 256), fp8_codes(2 * inner, 256).flip(0)])
    down = torch.stack([fp8_codes(256, inner), fp8_codes(256, inner).flip(0)])
    rows = -(-2 * inner // 128)
    scales = {"gate_up_proj": power_scales(2, rows, 2), "down_proj": power_scales(2, 2, 1)}
    tensors = {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": down}
    tensors |= {f"{stem}.{name}_{suffix}": value for name, value in scales.items()}
    done = convert(make_checkpoint(tensors, config(FP8_CONFIG)), "block-fp8")
    for expert in range(2):
        dense = QTensor(FP8, gate_up[expert], scales["gate_up_proj"][expert]).dequantize()
        for name, part in (("gate_proj", dense[:inner]), ("up_proj", dense[inner:])):
            got = {s: done.tensors[f"{stem}.{expert}.{name}.{s}"] for s in ("weight", "weight_scale_inv")}
            back = LAYOUTS["block-fp8"].unpack(got, FP8, (inner, 256)).dequantize()
            if inner == 128:  # a block does not span gate and up: the codes are taken over as they are
                assert torch.equal(back, part)
            assert ((back - part).abs() <= part.abs() / 16 + part.abs().max() / 448 * 2**-10).all()
