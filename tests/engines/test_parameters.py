"""What engines would have packed themselves, under the names that their parameters have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.engines.parameters import Engine, engine_parameters
from tilewright.engines.sglang.parameters import SGLANG
from tilewright.engines.vllm.parameters import VLLM
from tilewright.kernels.errors import LayoutError
from tilewright.kernels.packed.directory import load_packed
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget

Call = Callable[..., Path]
LAYER = "model.layers.1"


def engine_packing(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """`convert_weight_packed` of a matrix, block by block: bytes [K / columns][rows of the block][columns]."""
    blocks = []
    for block in weight.split(32):
        rows, k = block.shape
        blocks.append(block.reshape(rows, k // columns, columns).transpose(0, 1).reshape(-1))
        if weight.dtype == torch.int8:
            blocks.append((128 * block.int().sum(-1)).to(torch.int32).view(torch.int8))
    return torch.cat(blocks).reshape(weight.shape[0], -1)


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.id)
def test_int8(engine: Engine, quantized: Call, packed: Call) -> None:
    source = load_file(quantized("tiny-qwen3-moe", "int8") / "model.safetensors")
    found = dict(engine_parameters(load_packed(packed("tiny-qwen3-moe", "int8")), engine))
    parts = [source[f"{LAYER}.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(found[f"{LAYER}.self_attn.qkv_proj.weight"], engine_packing(torch.cat(parts), 4))
    scales = [source[f"{LAYER}.self_attn.{name}_proj.weight_scale"] for name in "qkv"]
    assert torch.equal(found[f"{LAYER}.self_attn.qkv_proj.weight_scale"], torch.cat(scales))
    expert = f"{LAYER}.mlp.experts.5"
    upper = torch.cat([source[f"{expert}.gate_proj.weight"], source[f"{expert}.up_proj.weight"]])
    assert found[f"{LAYER}.mlp.experts.w13_weight"].shape == (8, 256, 260)
    assert torch.equal(found[f"{LAYER}.mlp.experts.w13_weight"][5], engine_packing(upper, 4))
    assert found[f"{LAYER}.mlp.experts.w13_weight_scale"].shape == (8, 256, 1)
    assert torch.equal(found["lm_head.weight"], engine_packing(source["lm_head.weight"], 2))
    assert torch.equal(found["model.norm.weight"], source["model.norm.weight"])
    assert f"{LAYER}.self_attn.q_proj.weight" not in found


def test_fp8(quantized: Call, packed: Call) -> None:
    source = load_file(quantized("tiny-deepseek-v3", "block-fp8") / "model.safetensors")
    found = dict(engine_parameters(load_packed(packed("tiny-deepseek-v3", "block-fp8")), SGLANG))
    name = "model.layers.0.mlp"
    weights = [source[f"{name}.{part}_proj.weight"].view(torch.uint8) for part in ("gate", "up")]
    merged = found[f"{name}.gate_up_proj.weight"]
    assert merged.dtype == torch.float8_e4m3fn
    assert torch.equal(merged.view(torch.uint8), engine_packing(torch.cat(weights), 2))
    scales = [source[f"{name}.{part}_proj.weight_scale_inv"] for part in ("gate", "up")]
    assert torch.equal(found[f"{name}.gate_up_proj.weight_scale_inv"], torch.cat(scales))
    assert found[f"{LAYER}.mlp.experts.w13_weight_scale_inv"].shape == (8, 2, 2)
    assert found[f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight"].shape == (192, 256)


@pytest.mark.parametrize(
    ("engine", "names"),
    [(SGLANG, ("qweight", "qzeros", "scales")), (VLLM, ("weight_packed", "weight_zero_point", "weight_scale"))],
)
def test_int4(engine: Engine, names: tuple[str, ...], packed: Call) -> None:
    found = dict(engine_parameters(load_packed(packed("tiny-qwen3-moe", "w4afp8")), engine))
    shapes = [(8, 8, 2, 16 * 128 + 128), (8, 8, 2, 32), (8, 8, 2, 32)]
    for name, shape in zip(names, shapes, strict=True):
        assert found[f"{LAYER}.mlp.experts.w13_{name}"].shape == shape


def test_tensors_that_are_not_joined_are_views(packed: Call) -> None:
    opened = load_packed(packed("tiny-qwen3-moe", "int8"))
    found = dict(engine_parameters(opened, VLLM))
    name = f"{LAYER}.self_attn.o_proj.weight"
    assert found[name].data_ptr() == opened.tensor(name).data_ptr()


@pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.id)
def test_joined_when_packed_or_when_handed_over_is_the_same(engine: Engine, quantized: Call, tmp_path: Path) -> None:
    """What was packed as one is a view, what was not is joined now; names, shapes and bytes are equal."""
    checkpoint = open_checkpoint(quantized("tiny-deepseek-v3", "block-fp8"))
    opened = []
    for joins in (True, False):
        execute(plan_pack(checkpoint, CpuTarget(joins=joins)), checkpoint, tmp_path / str(joins))
        opened.append(load_packed(tmp_path / str(joins)))
    joined, apart = (dict(engine_parameters(packed, engine)) for packed in opened)
    assert joined.keys() == apart.keys()
    for name, tensor in joined.items():
        assert (tensor.dtype, tensor.shape) == (apart[name].dtype, apart[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), apart[name].reshape(-1).view(torch.uint8)), name
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert name not in opened[1].plain
    assert joined[name].data_ptr() == opened[0].tensor(name).data_ptr()


def pack(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    (folder / "source").mkdir()
    (folder / "source" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, folder / "source" / "model.safetensors")
    checkpoint = open_checkpoint(folder / "source")
    execute(plan_pack(checkpoint, CpuTarget()), checkpoint, folder / "packed")
    return folder / "packed"


def test_a_last_block_of_16_rows(tmp_path: Path) -> None:
    weight = torch.randn(48, 64).to(torch.bfloat16)
    found = dict(engine_parameters(load_packed(pack({"model.layers.0.o_proj.weight": weight}, tmp_path)), SGLANG))
    assert torch.equal(found["model.layers.0.o_proj.weight"], engine_packing(weight, 2))


def test_sizes_that_engines_do_not_run_are_listed(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.o_proj.weight": torch.zeros(40, 64),
        "model.layers.0.down_proj.weight": torch.zeros(32, 72),
    }
    packed = load_packed(pack({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, tmp_path))
    with pytest.raises(LayoutError) as error:
        list(engine_parameters(packed, VLLM))
    assert "o_proj: N = 40 is not a multiple of 16" in str(error.value)
    assert "down_proj: K = 72 is not a multiple of 32" in str(error.value)
