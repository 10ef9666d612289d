"""Norms: the reference's bits on every instruction set, transformers' numbers, and which norms are replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from tilewright.engines.transformers.norms import replace_norms
from tilewright.kernels.errors import KernelUnavailableError
from tilewright.kernels.modules.norms import RmsNorm
from tilewright.kernels.ops import reference
from tilewright.kernels.ops.norms import rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN for NaN."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def llama(weight: torch.Tensor, epsilon: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(weight.shape[0], epsilon)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


@given(data=st.data())
@settings(max_examples=60)
def test_bits_are_those_of_the_reference(isa: str, data: st.DataObject) -> None:
    m, k = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 200))
    dtype, weight_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    scale = data.draw(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e20, 1e38]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    x = (torch.randn(m, k, generator=generator) * scale).to(dtype)
    for value in data.draw(st.sets(st.sampled_from([float("nan"), float("inf"), -float("inf")]), max_size=1)):
        x[: m // 2, k // 2] = value
    weight = torch.randn(k, generator=generator).to(weight_dtype)
    epsilon = data.draw(st.sampled_from([0.0, 1e-6, 1e-5, 0.1]))
    before = x.clone()
    assert same_bits(rms_norm(x, weight, epsilon), reference.rms_norm(x, weight, epsilon))
    assert same_bits(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 31, 64, 576, 2048])
def test_the_numbers_of_transformers(k: int, dtype: torch.dtype) -> None:
    """Where squares sum exactly, the same bits; elsewhere the order of the sum moves few values by one step."""
    weight = torch.randn(k).to(dtype)
    module = llama(weight, 1e-6)
    whole = torch.randint(-40, 41, (2, 3, k)).to(dtype)
    assert same_bits(rms_norm(whole, weight, 1e-6), module(whole))
    x = torch.randn(2, 64, k).to(dtype)
    ours, theirs = rms_norm(x, weight, 1e-6), module(x)
    step = torch.finfo(dtype).eps * theirs.abs().float() + torch.finfo(dtype).tiny
    steps = 2 if dtype != torch.float32 else 4 + k / 64  # of the sum, that of fp32 alone shows
    assert ((ours - theirs).abs() <= steps * step).all()
    if dtype != torch.float32:
        assert (ours != theirs).float().mean() < 0.01


def test_rows_of_any_strides_and_threads() -> None:
    weight = torch.randn(48).bfloat16()
    wide = torch.randn(700, 3, 100).bfloat16()
    for x in (wide[:, :, 7:55], wide[:, 1, :48], wide.transpose(0, 1)[..., 2:50], wide[:, :, ::2][..., :48]):
        y = rms_norm(x, weight, 1e-6)
        assert y.is_contiguous()
        assert same_bits(y, rms_norm(x.contiguous(), weight, 1e-6))
    alone = torch.stack([rms_norm(row, weight, 1e-6) for row in wide[:, 0, :48]])
    assert same_bits(alone, rms_norm(wide[:, 0, :48], weight, 1e-6))


def test_opcheck_and_compilation() -> None:
    for dtype, weight_dtype in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        x, weight = torch.randn(2, 3, 40).to(dtype), torch.randn(40).to(weight_dtype)
        torch.library.opcheck(torch.ops.tilewright.rms_norm.default, (x, weight, 1e-6))
        norm = RmsNorm(nn.Parameter(weight, requires_grad=False), 1e-6)
        compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(x), norm(x))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 3), torch.ones(4), r"weight is \[4\], it must be \[3\]"),
        (torch.ones(2, 3), torch.ones(6)[::2], "contiguous"),
        (torch.ones(2, 3, dtype=torch.float64), torch.ones(3), "x must be float32, bfloat16 or float16"),
        (torch.ones(2, 3), torch.ones(3, dtype=torch.int64), "weight must be float32"),
        (torch.ones(()), torch.ones(1), "at least one dimension"),
    ],
)
def test_refusals(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        rms_norm(x, weight, 1e-6)


class CenteredRMSNorm(LlamaRMSNorm):
    """Has the name and the attributes, but centers its input first."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [
        (LlamaRMSNorm, True),
        (GemmaRMSNorm, False),
        (GptOssRMSNorm, False),
        (Qwen3NextRMSNorm, False),
        (Qwen3NextRMSNormGated, False),
        (CenteredRMSNorm, False),
    ],
)
def test_only_norms_that_compute_the_same_are_replaced(kind: Any, replaced: bool) -> None:
    model = nn.Sequential(kind(8), nn.LayerNorm(8))
    before = copy.deepcopy(model.state_dict())
    replace_norms(model)
    assert isinstance(model[0], RmsNorm) == replaced
    assert isinstance(model[1], nn.LayerNorm)
    assert model.state_dict().keys() == before.keys()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight", "1.bias"]
    if replaced:
        assert "8, eps=1e-06" in repr(model)


def test_gradients_are_refused_not_lost() -> None:
    norm = RmsNorm(nn.Parameter(torch.ones(8), requires_grad=False), 1e-6)
    y = norm(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(KernelUnavailableError, match="no gradients"):
        y.sum().backward()
