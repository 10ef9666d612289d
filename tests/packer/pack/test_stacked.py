"""16-bit experts that a source holds in one tensor for each projection: packed as if each had tensors of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tilewright.kernels.packed.module_spec import RankSharding
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.target import CpuTarget, GpuTarget
from tilewright.packer.plan import Plan
from tilewright.packer.verify.weights import compare_weights

Call = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
STACK = "model.layers.0.mlp.experts"
HIDDEN, INNER, EXPERTS = 64, 40, 4
FAMILIES = {"qwen3_moe": (False, False), "llama4": (True, False), "gpt_oss": (True, True)}  # transposed, interleaved


def separate(dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors = {}
    for expert in range(EXPERTS):
        for name, (n, k) in shapes.items():
            tensors[f"{STACK}.{expert}.{name}.weight"] = torch.randn(n, k, generator=generator).to(dtype)
            if bias:
                tensors[f"{STACK}.{expert}.{name}.bias"] = torch.randn(n, generator=generator).to(dtype)
    return tensors


def stacked(parts: Tensors, transposed: bool, interleaved: bool) -> Tensors:
    """The same as stacks, and biases as `….gate_up_proj_bias` and `….down_proj_bias`."""

    def gather(name: str, suffix: str) -> torch.Tensor:
        return torch.stack([parts[f"{STACK}.{expert}.{name}.{suffix}"] for expert in range(EXPERTS)])

    tensors = {}
    for suffix in ("weight", "bias") if f"{STACK}.0.up_proj.bias" in parts else ("weight",):
        gate, up, down = (gather(f"{name}_proj", suffix) for name in ("gate", "up", "down"))
        merged = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
        for name, tensor in (("gate_up_proj", merged), ("down_proj", down)):
            turned = tensor.transpose(1, 2).contiguous() if transposed and suffix == "weight" else tensor
            tensors[f"{STACK}.{name}" + ("_bias" if suffix == "bias" else "")] = turned
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_separate_experts(
    family: str, dtype: torch.dtype, write: Call, pack: Call, differences: Callable[[Path, Path], list[str]]
) -> None:
    parts = separate(dtype, bias=family == "gpt_oss")
    one = pack(write(stacked(parts, *FAMILIES[family]), model_type=family))
    assert differences(one, pack(write(parts, model_type=family))) == []


@pytest.mark.parametrize(
    "sharding",
    [RankSharding(tp=(1, 2)), RankSharding(ep=(0, 2)), RankSharding(ep=(1, 2)), RankSharding((3, 4), (1, 2))],
    ids=str,
)
def test_equal_in_every_cut(
    sharding: RankSharding, write: Call, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    parts = separate(bias=True)
    for name, tensors in (("stacked", stacked(parts, True, True)), ("separate", parts)):
        checkpoint = open_checkpoint(write(tensors, model_type="gpt_oss"))
        plan = plan_pack(checkpoint, CpuTarget(), sharding)
        assert name == "separate" or {fate.kind for fate in plan.fates.values()} == {"packed"}
        execute(plan, checkpoint, tmp_path / name)
    assert differences(tmp_path / "stacked", tmp_path / "separate") == []


def test_unpacked_they_are_separate(write: Call, pack: Call, unpack: Call) -> None:
    parts = separate(bias=True)
    back = load_file(unpack(pack(write(stacked(parts, True, True), model_type="gpt_oss"))) / "model.safetensors")
    assert back.keys() == parts.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in parts.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_verified_against_their_source(family: str, write: Call, pack: Call, convert: Call) -> None:
    """Packed, and quantized, matrices and biases are judged one expert at a time."""
    parts = separate(bias=True)
    source = write(stacked(parts, *FAMILIES[family]), model_type=family)
    for candidate in (pack(source), convert(source, "int8")):
        sides = [read_contents(open_checkpoint(path)) for path in (source, candidate)]
        results = [result for result, _ in compare_weights(*sides)]
        assert {result.name for result in results} == parts.keys()
        assert not any(result.failed for result in results)


REFUSED = {
    "an unknown family": (stacked(separate(), False, False), "unheard-of", "model_type `unheard-of` is not known"),
    "experts in fp32": (stacked(separate(torch.float32), False, False), "qwen3_moe", "experts stacked in one tensor"),
    "a side that is none": (
        {f"{STACK}.gate_up_proj": torch.zeros(2, 96, 72).bfloat16(), f"{STACK}.down_proj": torch.zeros(2, 72, 48)},
        "qwen3_moe",
        "neither side is hidden_size = 64",
    ),
    "no down": (
        {name: tensor for name, tensor in stacked(separate(), False, False).items() if "down" not in name},
        "qwen3_moe",
        "8 matrices (gate, up) are not experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, write: Call, plan: Callable[[Path], Plan]) -> None:
    tensors, family, reason = REFUSED[case]
    assert any(reason in str(reject) for reject in plan(write(tensors, model_type=family)).rejects)


def test_gpus_take_them_in_int4_alone(write: Call) -> None:
    source = open_checkpoint(write(stacked(separate(), False, False)))
    (reject, *_) = plan_pack(source, GpuTarget()).rejects
    assert "weight format bf16 is not int4" in str(reject)
