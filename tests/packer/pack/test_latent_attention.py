"""`w_kc` and `w_vc` give what attention with expanded keys and values gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright.kernels import ops
from tilewright.kernels.formats import FP8
from tilewright.kernels.packed.directory import load_packed
from tilewright.kernels.tensors import QTensor
from tilewright.packer.checkpoint.files import open_checkpoint
from tilewright.packer.engine.pipeline import execute
from tilewright.packer.pack.latent_attention import Heads, split_heads
from tilewright.packer.pack.planner import plan_pack
from tilewright.packer.pack.ranks import plan_ranks
from tilewright.packer.pack.target import CpuTarget
from tilewright.packer.plan import Plan

Call = Callable[..., Path]


@pytest.mark.parametrize(
    ("nope", "value", "exact"), [(128, 128, True), (64, 64, True), (256, 256, True), (128, 64, False)]
)
def test_codes_are_kept_where_scales_allow(nope: int, value: int, exact: bool) -> None:
    heads = Heads(3, nope, value, 200)
    n = 3 * (nope + value)
    generator = torch.Generator().manual_seed(nope)
    codes = torch.randn(n, 200, generator=generator).to(torch.float8_e4m3fn)
    q = QTensor(FP8, codes, torch.rand(FP8.scale_rows(n), FP8.scale_columns(200), generator=generator) + 0.5)
    keys, values = split_heads(q, heads)
    assert (keys.format is FP8) is exact
    assert {"w_kc": keys.shape, "w_vc": values.shape} == heads.shapes()
    rows = q.dequantize().reshape(3, nope + value, 200)
    rounded = rows if exact else rows.to(torch.bfloat16).float()
    assert torch.equal(keys.dequantize(), rounded[:, :nope].transpose(1, 2))
    assert torch.equal(values.dequantize(), rounded[:, nope:])


@pytest.mark.parametrize("scheme", ["none", "block-fp8", "int8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_attention_in_the_latent_space(scheme: str, tp: int, quantized: Call, unpack: Call, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantized("tiny-deepseek-v3", scheme))
    target = CpuTarget(absorbs=True)
    plans = [plan_pack(checkpoint, target)] if tp == 1 else plan_ranks(checkpoint, target, tp, 1)
    execute(plans[-1], checkpoint, tmp_path / "packed")
    packed = load_packed(tmp_path / "packed", tp - 1 if tp > 1 else None)
    path, heads, nope, value, rank = "model.layers.1.self_attn", 4 // tp, 64, 64, 128
    latent = torch.randn(7, rank).to(torch.bfloat16)
    query = torch.randn(heads, 5, nope).to(torch.bfloat16)
    expanded = packed[f"{path}.kv_b_proj"](latent).float().reshape(7, heads, nope + value).transpose(0, 1)
    keys, values = expanded.split([nope, value], -1)
    w_kc, w_vc = packed[f"{path}.w_kc"].tensors(), packed[f"{path}.w_vc"].tensors()
    scores = ops.bmm(query, w_kc[0], rank, *w_kc[1:]).float() @ latent.float().T
    assert close(scores, query.float() @ keys.transpose(1, 2))
    weights = scores.softmax(-1)
    result = ops.bmm((weights @ latent.float()).to(torch.bfloat16), w_vc[0], value, *w_vc[1:])
    assert close(result.float(), weights @ values)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((actual - wanted).norm() <= 0.02 * wanted.norm())


def test_they_change_nothing_else(
    quantized: Call, unpack: Call, differences: Callable[..., list[str]], tmp_path: Path
) -> None:
    source = quantized("tiny-deepseek-v3", "block-fp8")
    checkpoint = open_checkpoint(source)
    execute(plan_pack(checkpoint, CpuTarget(absorbs=True)), checkpoint, tmp_path / "packed")
    tilewright.load_model(tmp_path / "packed")
    assert differences(source, unpack(tmp_path / "packed")) == []


def test_a_config_that_does_not_fit_is_refused(write: Call) -> None:
    weight = {"model.layers.0.self_attn.kv_b_proj.weight": torch.zeros(96, 32, dtype=torch.bfloat16)}

    def plan(**config: object) -> Plan:
        source = write(weight, model_type="deepseek_v3", **config)
        return plan_pack(open_checkpoint(source), CpuTarget(absorbs=True))

    sizes = {"num_attention_heads": 2, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 32}
    assert "is [96, 32], config.json says 2 heads of 32 + 32 rows and 32 columns" in str(plan(**sizes).rejects[0])
    assert "config.json lacks one of num_attention_heads" in str(plan().rejects[0])
    assert not plan(**sizes | {"v_head_dim": 16}).rejects
