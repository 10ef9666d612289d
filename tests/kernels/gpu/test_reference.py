from __future__ import annotations

import pytest
import torch

from tilewright.kernels.formats import INT4_BY_GROUP
from tilewright.kernels.gpu import reference
from tilewright.kernels.layouts.gpu_hopper import GPU_HOPPER_W4
from tilewright.kernels.tensors import QTensor


@pytest.mark.parametrize("group", [32, 64, 128])
def test_dense_is_the_dequantized_weight(group: int) -> None:
    codes = torch.randint(0, 16, (2, 64, 384), dtype=torch.uint8)
    scales = (torch.rand(2, 64, 384 // group) + 0.1).to(torch.bfloat16).float()
    q = QTensor(INT4_BY_GROUP[group], codes, scales)
    packed = GPU_HOPPER_W4.pack(q)
    dense = reference.dense(packed["tiles"], packed["scales"], group, 384)
    assert torch.equal(dense, q.dequantize().double())


def test_activation_scales_follow_their_mode() -> None:
    x = torch.tensor([[1.0, -448.0], [0.0, 0.0], [2.0, 0.5]])
    assert reference.activation_scales(x, "tensor", None).tolist() == [1.0]
    assert reference.activation_scales(x, "token", None).tolist() == [1.0, 1.0, pytest.approx(2 / 448)]
    assert reference.activation_scales(x, "static", torch.tensor(0.25)).tolist() == [0.25]


def test_quantize_saturates() -> None:
    q = reference.quantize(torch.tensor([[1e9, -1e9, 0.3, 0.0]]), torch.tensor([1.0]))
    assert q.float().tolist() == [[448.0, -448.0, 0.3125, 0.0]]


@pytest.mark.parametrize("mode", ["static", "tensor", "token"])
def test_fused_experts_is_the_sum_of_its_experts(mode: reference.ActivationScale) -> None:
    """One pair at a time, in plain terms.

    FP8 holds the tokens exactly: they are powers of two. Hidden values are off by half a step, 2**-4 of themselves or,
    where they are tiny, 2**-10 of the scale; rounding to bf16 adds less than 2**-6.
    """
    w13 = torch.randint(-2, 3, (3, 8, 4)).double() / 4
    w2 = torch.randint(-2, 3, (3, 4, 4)).double() / 4
    x = (2.0 ** torch.randint(-2, 2, (5, 4)) * torch.randint(-1, 2, (5, 4))).to(torch.bfloat16)
    ids = torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 0], [7, 1]])
    weights = torch.rand(5, 2)
    one = torch.ones(1)
    got = reference.fused_experts(x, w13, w2, weights, ids, mode, one, one)
    want, bound = torch.zeros(2, 5, 4, dtype=torch.float64)
    for t in range(5):
        for j in range(2):
            if 0 <= ids[t, j] < 3:
                gate, up = (w13[ids[t, j]] @ x[t].double()).chunk(2)
                hidden = gate * torch.sigmoid(gate) * up
                want[t] += weights[t, j].double() * (w2[ids[t, j]] @ hidden)
                bound[t] += weights[t, j].double() * (w2[ids[t, j]].abs() @ (hidden.abs() * (2**-4 + 2**-6) + 2**-10))
    assert torch.equal(got[2], torch.zeros(4).double())
    assert ((got - want).abs() <= bound).all()
