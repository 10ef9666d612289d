"""Shares of a model: joined they are the whole, and cuts that no share can represent are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.formats import BF16, FP8, INT4_G32, INT4_G128, INT8, WeightFormat
from tilewright.kernels.modules import PackedExperts
from tilewright.kernels.packed.directory import load_packed
from tilewright.kernels.packed.module_spec import RankSharding
from tilewright.kernels.tensors import QTensor, TensorSpec
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.families import family_of
from tilewright.packer.pack.degrees import Degrees, forbids_cuts
from tilewright.packer.pack.ranks import plan_ranks
from tilewright.packer.pack.sharding import RankSlice, sharding_of_rank
from tilewright.packer.pack.target import CpuTarget

Call = Callable[..., Path]


def weight(fmt: WeightFormat, n: int, k: int) -> QTensor:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 15, (n, k), generator=generator).to(fmt.code_dtype)
    if not fmt.has_scales:
        return QTensor(fmt, codes)
    return QTensor(fmt, codes, torch.rand(fmt.scale_rows(n), fmt.scale_columns(k), generator=generator) + 0.1)


@pytest.mark.parametrize(
    ("fmt", "n", "k", "count"),
    [
        (BF16, 6, 10, 2),
        (INT8, 40, 64, 4),
        (FP8, 256, 512, 2),
        (FP8, 128, 128, 4),
        (FP8, 384, 384, 3),
        (INT4_G32, 8, 128, 4),
    ],
)
def test_shares_joined_are_the_whole(fmt: WeightFormat, n: int, k: int, count: int) -> None:
    q = weight(fmt, n, k)
    for axis, kind in ((0, "rows"), (1, "columns")):
        shares = [RankSlice(**{kind: (number, count)}) for number in range(count)]
        assert all(share.why_not(n, k) is None for share in shares)
        joined = torch.cat([share.take(q).dequantize() for share in shares], axis)
        assert torch.equal(joined, q.dequantize())


@pytest.mark.parametrize(
    ("n", "k", "share", "reason"),
    [
        (7, 8, RankSlice(rows=(0, 2)), "7 rows are not 2 equal shares"),
        (8, 9, RankSlice(columns=(1, 2)), "9 columns are not 2 equal shares"),
        (192, 128, RankSlice(rows=(1, 2)), None),
        (8, 704, RankSlice(columns=(3, 4)), None),
    ],
)
def test_impossible_shares(n: int, k: int, share: RankSlice, reason: str | None) -> None:
    assert share.why_not(n, k) == reason


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((FP8, INT4_G32, INT4_G128, INT8, BF16)), st.integers(1, 90), st.integers(1, 90), st.integers(2, 9)
)
def test_shares_keep_the_scales_of_the_whole(fmt: WeightFormat, rows: int, columns: int, count: int) -> None:
    """Whatever the widths: what is stored of a share, without its zeros, is that part of the whole to the bit."""
    n, k = rows * count, columns * count
    for asymmetric in {False, fmt.zero_point > 0}:
        q = weight(fmt, n, k)
        if asymmetric:
            q = replace(q, zeros=torch.randint(0, 16, (n, fmt.scale_columns(k)), dtype=torch.uint8))
        for axis, kind in ((0, "rows"), (1, "columns")):
            parts = []
            for number in range(count):
                share = RankSlice(**{kind: (number, count)})
                leading = share.leading(fmt, n, k)
                stored = share.take(q, leading)
                assert stored.scales is None or stored.scales.shape[1] == fmt.scale_columns(stored.shape[1])
                assert stored.scales is None or stored.scales.shape[0] == fmt.scale_rows(stored.shape[0])
                values = stored.dequantize()
                assert not values[: leading[0]].any()
                assert not values[:, : leading[1]].any()
                parts.append(values[leading[0] :, leading[1] :])
            assert torch.equal(torch.cat(parts, axis), q.dequantize())


def test_biases_are_added_once() -> None:
    bias = torch.arange(8.0)
    assert torch.equal(RankSlice(rows=(1, 2)).take_bias(bias), bias[4:])
    assert torch.equal(RankSlice(columns=(0, 2)).take_bias(bias) + RankSlice(columns=(1, 2)).take_bias(bias), bias)


def test_cuts_of_ranks() -> None:
    assert [sharding_of_rank(rank, 1, 2) for rank in range(2)] == [
        RankSharding((0, 1), (0, 2)),
        RankSharding((0, 1), (1, 2)),
    ]
    assert [sharding_of_rank(rank, 4, 2).ep for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def degrees(config: dict[str, Any]) -> Degrees:
    return Degrees(family_of(config), config)


def test_models_that_cannot_be_cut() -> None:
    config = {"num_attention_heads": 6, "num_key_value_heads": 2}
    assert [str(reject) for reject in degrees(config).rejects(4, 3)] == [
        "--ep: 4 ranks are not 3 equal groups; choose --ep so that it divides --tp"
    ]
    assert [str(reject) for reject in degrees(config).rejects(4, 1)] == [
        "config.json: num_attention_heads = 6 is not 4 equal shares",
        "config.json: num_key_value_heads = 2 is not 4 equal shares",
    ]
    assert [str(reject) for reject in degrees(config).rejects(1, 2)] == [
        "--ep: there are no routed experts to deal to ranks; cut a dense model with --tp alone"
    ]


def test_matrices_and_numbers_that_no_rule_cuts() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shapes = {
        "model.layers.0.self_attn.qkv_proj.weight_packed": (128, 8),
        "model.layers.0.self_attn.qkv_proj.weight_scale": (128, 2),
        "model.layers.0.self_attn.q_norm.weight": (64,),
        "model.layers.0.self_attn.k_norm.weight": (16,),
        "model.layers.0.self_attn.sinks": (4,),
        "model.layers.0.mlp.gate_up_proj.weight": (128, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 64),
        "model.layers.1.mlp.experts.gate_up_proj": (4, 128, 64),
        "model.layers.1.mlp.experts.gate_up_proj_bias": (4, 128),
    }
    specs = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
    assert [reject.name for reject in forbids_cuts(config, specs, (), family_of(config))] == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.sinks",
    ]


def cut(source: Path, output: Path, tp: int, ep: int) -> list[Path]:
    checkpoint = open_checkpoint(source)
    directories = [output / f"rank-{rank}-of-{max(tp, ep)}" for rank in range(max(tp, ep))]
    for directory, plan in zip(directories, plan_ranks(checkpoint, CpuTarget(), tp, ep), strict=True):
        execute(plan, checkpoint, directory)
    return directories


@pytest.mark.parametrize(
    ("model", "scheme", "tp", "ep"),
    [
        ("tiny-qwen3-moe", "none", 2, 1),
        ("tiny-qwen3-moe", "block-fp8", 2, 2),
        ("tiny-deepseek-v3", "int8", 4, 2),
        ("tiny-deepseek-v3", "w4afp8", 1, 4),
        ("tiny-deepseek-v3", "w4afp8", 2, 1),
    ],
)
def test_ranks_joined_equal_the_uncut_layer(
    model: str, scheme: str, tp: int, ep: int, quantized: Call, packed: Call, tmp_path: Path
) -> None:
    cut(quantized(model, scheme), tmp_path, tp, ep)
    whole = load_packed(packed(model, scheme))
    ranks = [load_packed(tmp_path, rank) for rank in range(max(tp, ep))]
    attention = "model.layers.1.self_attn"
    by_rows = f"{attention}.kv_b_proj" if "deepseek" in model else f"{attention}.q_proj"
    x = torch.randn(5, whole[by_rows].in_features).to(torch.bfloat16)
    parts = [rank[by_rows](x) for rank in ranks]
    assert torch.equal(torch.cat(parts, -1) if tp > 1 else parts[0], whole[by_rows](x))
    x = torch.randn(5, whole.specs[f"{attention}.o_proj"].shape[1]).to(torch.bfloat16)
    inputs = x.chunk(tp, -1)
    total = sum(rank[f"{attention}.o_proj"](inputs[number]).float() for number, rank in enumerate(ranks[:tp]))
    wanted = whole[f"{attention}.o_proj"](x).float()
    assert (total - wanted).norm() <= 0.02 * wanted.norm()
    stack = "model.layers.1.mlp.experts"
    x, ids, scores = torch.randn(5, 256).to(torch.bfloat16), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
    outputs = [PackedExperts(stack, m[f"{stack}.w13"], m[f"{stack}.w2"])(x, ids, scores) for m in (whole, *ranks)]
    total = sum(y.float() for y in outputs[1:])
    assert (total - outputs[0].float()).norm() <= 0.02 * outputs[0].float().norm()
    assert ranks[1].specs[f"{stack}.w13"].needs_all_reduce is (ep > 1)


def test_refused_cuts_name_the_possible_ones(quantized: Call) -> None:
    plans = plan_ranks(open_checkpoint(quantized("tiny-qwen3-moe", "w4afp8")), CpuTarget(), 4, 1)
    reasons = [str(reject) for reject in plans[0].rejects]
    assert "config.json: num_key_value_heads = 2 is not 4 equal shares" in reasons
    hint = "possible are --tp 1, 2; alone, --ep 1, 2, 4, 8"
    assert reasons[0] == f"--tp 4 --ep 1: this model cannot be cut so; {hint}"


def test_a_share_is_not_unpacked(quantized: Call, unpack: Call, tmp_path: Path) -> None:
    first, *_ = cut(quantized("tiny-qwen3-moe", "none"), tmp_path / "cut", 2, 1)
    with pytest.raises(Exception, match="one rank's share"):
        unpack(first)
    assert json.loads((first / "manifest.json").read_text())["options"]["cut"] == RankSharding((0, 2), (0, 1)).to_json()
