"""Quantization configs in files of their own, and codes that no config announces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright.kernels.errors import SchemeError
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

from . import compressed_sources, float_sources  # noqa: F401  # add their variants
from .conftest import Read
from .sources import MODULE, VARIANTS


@pytest.mark.parametrize(
    ("variant", "file", "key"),
    [
        ("gptq-4-128-asym-gptq", "quantize_config.json", None),
        ("awq-128", "quant_config.json", None),
        ("modelopt-nvfp4", "hf_quant_config.json", "quantization"),
    ],
)
def test_a_config_in_a_file_of_its_own_counts(variant: str, file: str, key: str | None, tmp_path: Path) -> None:
    source = VARIANTS[variant]()
    save_file(source.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(source.config))
    block = {name: value for name, value in source.block.items() if name != "quant_method"}
    (tmp_path / file).write_text(json.dumps({key: block, "producer": {"name": "modelopt"}} if key else block))
    checkpoint = open_checkpoint(tmp_path)
    expected = source.oracle(source.tensors, source.block)[MODULE]
    assert torch.equal(read_contents(checkpoint).weights[f"{MODULE}.weight"].values(), expected.float())
    plan = plan_quantize(checkpoint, QuantizeOptions("int8"))
    assert not plan.rejects
    assert file in plan.stale_files


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"weight": torch.ones(64, 32, dtype=torch.uint8)}, "looks like codes"),
        ({"weight": torch.ones(64, 4, dtype=torch.int32)}, "looks like codes"),
        ({"qweight": torch.ones(8, 64, dtype=torch.int32)}, "looks like GPTQ or AWQ codes"),
        ({"weight_packed": torch.ones(64, 8, dtype=torch.int32)}, "looks like codes of compressed-tensors"),
        ({"weight.absmax": torch.ones(64)}, "weights that bitsandbytes quantized"),
        ({"SCB": torch.ones(64)}, "weights that bitsandbytes quantized"),
        ({"W_q": torch.ones(64, 32, dtype=torch.uint8)}, "looks like HQQ codes"),
    ],
)
def test_codes_without_a_config_are_refused_by_every_job(
    tensors: dict[str, torch.Tensor], reason: str, tmp_path: Path
) -> None:
    plain = {"model.layers.0.mlp.down_proj.weight": torch.ones(256, 256).bfloat16()}
    save_file(plain | {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 256}))
    checkpoint = open_checkpoint(tmp_path)
    for plan in (plan_quantize(checkpoint, QuantizeOptions("int8")), plan_pack(checkpoint, CpuTarget())):
        assert any(reason in str(reject) for reject in plan.rejects)


def test_a_second_rounding_is_told(tmp_path: Path) -> None:
    source = VARIANTS["modelopt-nvfp4"]()
    save_file(source.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(source.document()))
    notes = plan_quantize(open_checkpoint(tmp_path), QuantizeOptions("int4")).notes
    assert any("NVFP4 weights are quantized a second time" in note for note in notes)


UNREAD: dict[str, tuple[str, dict[str, object], str]] = {  # variant, what its config says besides, reason
    "2:4": (
        "ct-int8-channel",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "2 in 4 are left out of compressed",
    ),
    "sparse": (
        "ct-fp8-channel",
        {"sparsity_config": {"format": "sparse-bitmask"}},
        "sparse weights of compressed-tensors",
    ),
    "marlin": ("ct-pack4-g128", {"format": "marlin-24"}, "laid out for Marlin of compressed-tensors are not read"),
    "mxfp6": ("ct-mxfp4", {"format": "mxfp6-pack-quantized"}, "MXFP6 weights of compressed-tensors are not read"),
    "transform": (
        "ct-pack4-g128",
        {"transform_config": {"config_groups": {"u": {"type": "random-matrix", "apply": []}}}},
        "transform_config",
    ),
    "experts": ("ct-pack4-g128", {"moe_sparsity_config": {"format": "x"}}, "moe_sparsity_config"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_is_refused_by_every_job_in_the_words_of_its_users(name: str, tmp_path: Path) -> None:
    variant, said, reason = UNREAD[name]
    source = VARIANTS[variant]()
    save_file(source.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(source.config | {"quantization_config": source.block | said}))
    checkpoint = open_checkpoint(tmp_path)
    for plan in (plan_quantize(checkpoint, QuantizeOptions("int8")), plan_pack(checkpoint, CpuTarget())):
        assert any(reason in reject.reason for reject in plan.rejects)


@pytest.mark.parametrize("variant", ["ct-pack4-g32", "ct-pack4-g128", "ct-pack4-asym", "ct-pack3-g64"])
def test_the_shape_that_data_state_is_compared(variant: str, read: Read) -> None:
    source = VARIANTS[variant]()
    source.tensors[f"{MODULE}.weight_shape"] = source.tensors[f"{MODULE}.weight_shape"] * 2
    with pytest.raises(SchemeError, match=r"`weight_shape` says \[192, 512\], its words and scales say \[96, 256\]"):
        read(source.tensors, source.document())
