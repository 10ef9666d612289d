"""A family of models with names of its own, outside of the package: quantized, packed, cut in two and loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright import load_packed
from tilewright.kernels.modules import PackedLinear
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.checkpoint.reading import read_contents
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.families import FAMILIES
from tilewright.packer.families.experts import ExpertNames, ExpertSpellings
from tilewright.packer.families.family import ModelFamily
from tilewright.packer.families.parallel import MergedLinear, ParallelAxes
from tilewright.packer.families.roles import Rule, tail
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.ranks import plan_ranks
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.quantize.options import QuantizeOptions
from tilewright.packer.quantize.planner import plan_quantize

ODD = ModelFamily(
    id="odd",
    model_types=("odd",),
    rules=(Rule(tail("wonder_[qkvo]"), "linear"), Rule(tail("chooser"), "router")),
    experts=ExpertSpellings((ExpertNames("opens", "lifts", "lowers", "opens_lifts", container="specialists"),)),
    merged=(MergedLinear("wonder_qkv", ("wonder_q", "wonder_k", "wonder_v")),),
    axes=ParallelAxes(
        rows=("wonder_q", "wonder_k", "wonder_v", "opens", "lifts"), columns=("wonder_o", "lowers"), fused=()
    ),
)
HIDDEN, INNER, EXPERTS = 128, 256, 4


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with FAMILIES.extended(ODD):
        yield


def write(root: Path, stacked: bool) -> Path:
    """A layer of the family, its experts apart or in stacks."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    layer = "model.layers.0"
    tensors = {f"{layer}.heed.wonder_{part}.weight": normal(HIDDEN, HIDDEN) for part in "qkvo"}
    tensors[f"{layer}.crowd.chooser.weight"] = normal(EXPERTS, HIDDEN)
    gates, lifts = normal(EXPERTS, INNER, HIDDEN), normal(EXPERTS, INNER, HIDDEN)
    lowers = normal(EXPERTS, HIDDEN, INNER)
    stack = f"{layer}.crowd.specialists"
    if stacked:
        tensors |= {f"{stack}.opens_lifts": torch.cat([gates, lifts], 1), f"{stack}.lowers": lowers}
    else:
        for name, matrices in (("opens", gates), ("lifts", lifts), ("lowers", lowers)):
            tensors |= {f"{stack}.{e}.{name}.weight": matrix.clone() for e, matrix in enumerate(matrices)}
    root.mkdir()
    save_file(tensors, root / "model.safetensors")
    config = {"model_type": "odd", "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize("stacked", [False, True])
def test_quantized_packed_cut_and_loaded(stacked: bool, tmp_path: Path) -> None:
    source = open_checkpoint(write(tmp_path / "source", stacked))
    plan = plan_quantize(source, QuantizeOptions("int8"))
    assert not plan.rejects
    assert {fate.kind for name, fate in plan.fates.items() if "chooser" not in name} == {"quantized"}
    execute(plan, source, tmp_path / "int8")
    quantized = open_checkpoint(tmp_path / "int8")
    values = {name: weight.values() for name, weight in read_contents(quantized).weights.items()}
    assert f"model.layers.0.crowd.specialists.{EXPERTS - 1}.lowers.weight" in values

    whole = plan_pack(quantized, CpuTarget())
    assert not whole.rejects
    execute(whole, quantized, tmp_path / "whole")
    cuts = plan_ranks(quantized, CpuTarget(), tp=2, ep=1)
    for rank, cut in enumerate(cuts):
        assert not cut.rejects
        execute(cut, quantized, tmp_path / f"rank-{rank}")

    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    ranks = [load_packed(tmp_path / f"rank-{rank}", rank=rank) for rank in range(2)]
    loaded = load_packed(tmp_path / "whole")
    assert "model.layers.0.heed.wonder_qkv" in loaded
    for name, cut_along in (("heed.wonder_q", 0), ("heed.wonder_o", 1)):
        expected = x.float() @ values[f"model.layers.0.{name}.weight"].T
        module = loaded[f"model.layers.0.{name}"]
        assert isinstance(module, PackedLinear)
        close(module(x), expected)
        halves = [packed[f"model.layers.0.{name}"] for packed in ranks]
        if cut_along == 0:
            close(torch.cat([half(x) for half in halves], 1), expected)
        else:
            close(sum(half(part) for half, part in zip(halves, x.chunk(2, 1), strict=True)), expected)
    shapes = {
        packed.specs[f"model.layers.0.crowd.specialists.{part}"].shape for packed in ranks for part in ("w13", "w2")
    }
    assert shapes == {(EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER // 2)}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.float() - expected).norm() < 2e-2 * expected.norm()


def test_without_the_family_the_names_say_nothing(tmp_path: Path) -> None:
    root = write(tmp_path / "source", stacked=False)
    config = json.loads((root / "config.json").read_text()) | {"model_type": "llama"}
    (root / "config.json").write_text(json.dumps(config))
    plan = plan_quantize(open_checkpoint(root), QuantizeOptions("int8"))
    assert {fate.kind for fate in plan.fates.values()} == {"copied"}
    assert any("nothing would be quantized" in str(reject) for reject in plan.rejects)
