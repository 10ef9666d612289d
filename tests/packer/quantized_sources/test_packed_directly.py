"""Int4 sources of others are packed without a second rounding, run by their own numbers, and come back to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright import load_packed
from tilewright.kernels.errors import TilewrightError
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.job import RunOptions
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.pack.unpack import plan_unpack
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize
from tilewright.packer.verify.weights import compare_weights

from . import compressed_sources, library_sources, recorded_sources  # noqa: F401  # add their variants
from .sources import MODULE, VARIANTS, QuantizedSource

DIRECT = (
    *("gptq-4-32-sym-gptq", "gptq-4-128-asym-gptq", "gptq-4-64-asym-gptq_v2", "awq-32", "awq-64", "awq-128"),
    *(
        "auto-round-4-sym-gptq",
        "auto-round-4-asym-gptq_v2",
        "auto-round-awq",
        "ct-pack4-asym",
        "ct-pack4-g32",
        "ct-mxfp4",
    ),
)
REFUSED = ("gptq-4-128-asym-order-gptq", "gptq-8-128-sym-gptq", "awq--1", "ct-nvfp4", "gptq-3-128-sym-gptq")
REFUSED += ("mlx-8-128-fp32", "recorded-bnb-nf4-double", "recorded-hqq-4-64-1", "recorded-torchao-fp8", "quark-mxfp4")


def write(root: Path, source: QuantizedSource) -> Path:
    root.mkdir()
    tensors = {name: tensor.clone().contiguous() for name, tensor in source.tensors.items()}
    save_file(tensors, root / "model.safetensors", source.metadata or None)
    (root / "config.json").write_text(json.dumps(source.document()))
    return root


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", DIRECT)
def test_packed_run_and_unpacked(name: str, scales: torch.dtype, tmp_path: Path) -> None:
    source = VARIANTS[name]()
    scale = next(tensor for tensor in source.tensors if tensor.endswith(("scales", "weight_scale")))
    if source.tensors[scale].is_floating_point():
        source.tensors[scale] = source.tensors[scale].to(scales)
    expected = source.oracle(source.tensors, source.block)[MODULE].float()
    checkpoint = open_checkpoint(write(tmp_path / "source", source))

    plan = plan_pack(checkpoint, CpuTarget())
    assert not plan.rejects
    execute(plan, checkpoint, tmp_path / "packed")
    packed = open_checkpoint(tmp_path / "packed")
    results = [result for result, _ in compare_weights(read_contents(checkpoint), read_contents(packed))]
    assert [result.status for result in results] == ["equal"]
    assert torch.equal(read_contents(packed).weights[f"{MODULE}.weight"].values(), expected)

    x = torch.randn(5, expected.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    y, exact = load_packed(tmp_path / "packed")[MODULE](x).float(), x.float() @ expected.T
    assert (y - exact).norm() < 1e-2 * exact.norm()  # activations are int8 there

    execute(plan_unpack(packed), packed, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == source.tensors.keys()
    for tensor, stored in source.tensors.items():
        assert back[tensor].dtype == stored.dtype
        assert torch.equal(back[tensor], stored), tensor
    document = json.loads((tmp_path / "back" / "config.json").read_text())
    assert document["quantization_config"] == source.block


@pytest.mark.parametrize("name", [name for name in REFUSED if name in VARIANTS])
def test_others_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "source", VARIANTS[name]()))
    (reject,) = plan_pack(checkpoint, CpuTarget()).rejects
    assert reject.name == MODULE
    assert reject.reason.startswith("no packed layout holds")
    assert "quantize-model" in str(reject.hint)


def test_an_order_that_the_config_does_not_announce_is_seen(tmp_path: Path) -> None:
    source = VARIANTS["gptq-4-128-asym-gptq"]()
    source.tensors[f"{MODULE}.g_idx"] = source.tensors[f"{MODULE}.g_idx"].flip(0)
    checkpoint = open_checkpoint(write(tmp_path / "source", source))
    with pytest.raises(TilewrightError, match="in the order of activations"):
        execute(plan_pack(checkpoint, CpuTarget()), checkpoint, tmp_path / "packed")


AGAIN = (
    *("gptq-4-128-asym-order-gptq", "awq-128", "ct-pack4-asym", "ct-nvfp4", "ct-mxfp4", "quark-mxfp4", "mlx-4"),
    *("recorded-bnb-nf4-double", "recorded-hqq-4-64-0", "recorded-torchao-int4-64"),
)


@pytest.mark.parametrize("name", [name for name in AGAIN if name in VARIANTS])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_all_of_them_are_quantized_again(name: str, scheme: str, tmp_path: Path) -> None:
    """From the values that they stand for: the same output as from a plain checkpoint of those."""
    source = VARIANTS[name]()
    values = source.oracle(source.tensors, source.block)[MODULE].float()
    plain = QuantizedSource({f"{MODULE}.weight": values}, {}, source.oracle, source.config)
    outputs = []
    for kind, made in (("quantized", source), ("plain", plain)):
        root = write(tmp_path / kind, made)
        if not made.block:
            (root / "config.json").write_text(json.dumps(made.config))
        checkpoint = open_checkpoint(root)
        plan = plan_quantize(checkpoint, QuantizeOptions(scheme))
        assert not plan.rejects
        execute(plan, checkpoint, tmp_path / f"{kind}-out")
        outputs.append(load_file(tmp_path / f"{kind}-out" / "model.safetensors"))
    assert outputs[0].keys() == outputs[1].keys()
    assert all(torch.equal(tensor, outputs[1][tensor_name]) for tensor_name, tensor in outputs[0].items())


@pytest.mark.skipif("mlx" not in library_sources.INSTALLED, reason="MLX is not installed")
def test_what_no_config_of_ours_describes_becomes_16_bits(tmp_path: Path) -> None:
    """MLX quantizes embeddings and heads too; the output keeps them in bf16, and says nothing of MLX."""
    source = VARIANTS["mlx-4"]()
    embedding = {name.replace(MODULE, "model.embed_tokens"): tensor for name, tensor in source.tensors.items()}
    source.tensors |= embedding
    checkpoint = open_checkpoint(write(tmp_path / "source", source))
    plan = plan_quantize(checkpoint, QuantizeOptions("int8", exclude=("lm_head",)))
    assert not plan.rejects
    execute(plan, checkpoint, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = source.oracle(source.tensors, source.block)[MODULE]
    assert set(tensors) == {f"{MODULE}.weight", f"{MODULE}.weight_scale", "model.embed_tokens.weight"}
    assert torch.equal(tensors["model.embed_tokens.weight"], expected.bfloat16())
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text())
    output = open_checkpoint(tmp_path / "out")
    results = [result for result, _ in compare_weights(read_contents(checkpoint), read_contents(output))]
    assert {result.name: result.status for result in results} == {
        f"{MODULE}.weight": "ok",
        "model.embed_tokens.weight": "equal",
    }


@pytest.mark.parametrize("name", ["recorded-bnb-nf4", "recorded-hqq-4-64-1"])
def test_a_source_whose_shapes_lie_in_data_is_not_consumed(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "source", VARIANTS[name]()))
    plan = plan_quantize(checkpoint, QuantizeOptions("int8"))
    with pytest.raises(TilewrightError, match="--consume needs a source that headers describe"):
        execute(plan, checkpoint, tmp_path / "out", RunOptions(consume=True))
