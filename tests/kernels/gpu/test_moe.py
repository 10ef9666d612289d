from __future__ import annotations

import pytest
import torch

from tilewright.kernels.errors import LayoutError
from tilewright.kernels.formats import INT4_G128
from tilewright.kernels.gpu import moe, reference
from tilewright.kernels.layouts.gpu_hopper import GPU_HOPPER_W4
from tilewright.kernels.tensors import QTensor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODES = ("static", "tensor", "token")


def weight(experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (experts, n, k), dtype=torch.uint8)
    packed = GPU_HOPPER_W4.pack(QTensor(INT4_G128, codes, torch.rand(experts, n, k // 128) * 0.02 + 0.002))
    return packed["tiles"], packed["scales"]


def layer(tokens: int, experts: int, k: int, hidden: int = 256, inner: int = 384) -> list[torch.Tensor]:
    """Operands up to the ids, of which about a fifth point nowhere."""
    x = torch.randn(tokens, hidden).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).to(torch.int32)
    ids[torch.rand(ids.shape) < 0.2] = -1
    return [x, *weight(experts, 2 * inner, hidden), *weight(experts, hidden, inner), torch.rand(tokens, k), ids]


def expected(args: list[torch.Tensor], mode: reference.ActivationScale, *scales: torch.Tensor) -> torch.Tensor:
    x, tiles13, scales13, tiles2, scales2, weights, ids = args
    w13 = reference.dense(tiles13, scales13, 128, x.shape[1])
    return reference.fused_experts(
        x, w13, reference.dense(tiles2, scales2, 128, w13.shape[1] // 2), weights, ids, mode, *scales
    )


@pytest.mark.parametrize("mode", MODES)
def test_cpu_operator_is_the_reference(mode: reference.ActivationScale) -> None:
    args = layer(5, 4, 2)
    scales = torch.tensor([0.01]), torch.tensor([0.02])
    got = moe.w4a8_fused_experts(*args, mode, *scales)
    assert torch.equal(got, expected(args, mode, *scales).to(torch.bfloat16))


def test_operator_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.tilewright.w4a8_fused_experts.default, tuple(layer(3, 2, 2)))


def test_operator_compiles() -> None:
    args = layer(3, 2, 2)
    compiled = torch.compile(lambda *a: moe.w4a8_fused_experts(*a) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*args), moe.w4a8_fused_experts(*args) + 1)


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, torch.zeros(5, 256), "`x` is torch.float32"),
        (5, torch.rand(5, 3), r"\[5, 2\] and \[5, 3\]"),
        (6, torch.zeros(5, 2), "not integers"),
        (3, torch.zeros(4, 3, 1, 64, 64, dtype=torch.uint8), "192 columns"),
    ],
)
def test_refusals_name_the_operand(position: int, value: torch.Tensor, words: str) -> None:
    args = layer(5, 4, 2)
    args[position] = value
    with pytest.raises(LayoutError, match=words):
        moe.w4a8_fused_experts(*args)


def test_static_mode_demands_its_scales() -> None:
    with pytest.raises(LayoutError, match="a1_scale"):
        moe.w4a8_fused_experts(*layer(1, 2, 1), "static")
    with pytest.raises(LayoutError, match="mode `row`"):
        moe.w4a8_fused_experts(*layer(1, 2, 1), "row")


# The tensor cores' sums differ from float64 in the 13th bit or so. Where that moves a hidden value to the next bf16
# number, or the magnitude that sets a scale, all FP8 numbers made from it may lie on the other side of a boundary: one
# step of bf16 (2**-8) against steps of FP8 (2**-3.5 on average) moves one value in 23 by such a step, which comes to
# sqrt(2**-4.5) * 2**-3.5 of the result at most.
LAYER_ERROR = 2**-5.75


@needs_gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 2), (37, 8, 8), (300, 33, 3)])
def test_gpu_agrees_with_float64(mode: reference.ActivationScale, tokens: int, experts: int, k: int) -> None:
    args = layer(tokens, experts, k)
    scales = torch.tensor([0.01]), torch.tensor([0.02])
    got = moe.w4a8_fused_experts(*(a.cuda() for a in args), mode, *(s.cuda() for s in scales)).cpu().double()
    want = expected(args, mode, *scales)
    assert torch.isfinite(got).all()
    assert (got - want).norm() <= LAYER_ERROR * want.norm()


@needs_gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [128, 384, 2048])
def test_gpu_rounds_activations_as_the_reference_does(mode: reference.ActivationScale, width: int) -> None:
    """Given the same hidden values: equal but where an exponential's last bit decides between two FP8 numbers."""
    hidden = (torch.randn(50, 2 * width) * 3).to(torch.bfloat16).cuda()
    offsets = torch.tensor([0, 20, 20, 45], dtype=torch.int32).cuda()
    static = torch.tensor([0.02]).cuda()
    amax = torch.zeros(2).cuda()
    rows, scale = moe._activate(hidden, offsets, amax, mode, static)
    gate, up = hidden[:45].float().chunk(2, -1)
    values = torch.nn.functional.silu(gate) * up
    want_scale = reference.activation_scales(values, mode, static)
    torch.testing.assert_close(scale[: want_scale.numel()], want_scale, rtol=1e-6, atol=0)
    same = rows[:45].view(torch.uint8) == reference.quantize(values, want_scale).view(torch.uint8)
    assert same.float().mean() > 0.9995


@needs_gpu
@pytest.mark.parametrize("mode", MODES)
def test_gpu_sorts_and_rounds_tokens_as_the_reference_does(mode: reference.ActivationScale) -> None:
    x = torch.randn(70, 512).to(torch.bfloat16)
    ids = torch.randint(-2, 9, (70, 4), dtype=torch.int32)
    static = torch.tensor([0.02])
    rows, scale, offsets, positions, _ = moe._sort(x.cuda(), ids.cuda(), 7, mode, static.cuda())
    here = (ids >= 0) & (ids < 7)
    counts = torch.bincount(ids[here], minlength=7)
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    token, slot = here.nonzero(as_tuple=True)
    position = positions.cpu().reshape(70, 4)[token, slot].long()
    assert sorted(position.tolist()) == list(range(len(position)))
    assert torch.equal(torch.bucketize(position, offsets.cpu()[1:].long(), right=True), ids[token, slot].long())
    want_scale = reference.activation_scales(x.float()[token], mode, static)
    got_scale = scale.cpu()[position] if mode == "token" else scale.cpu()
    assert torch.equal(got_scale, want_scale)
    want = reference.quantize(x.float()[token], want_scale)
    assert torch.equal(rows.cpu()[position].view(torch.uint8), want.view(torch.uint8))


@needs_gpu
def test_gpu_contributes_nothing_for_absent_experts() -> None:
    args = layer(20, 4, 2)
    args[6] = torch.full_like(args[6], -1)
    args[6][3, 1] = 2
    args[6][4, 0] = 100
    got = moe.w4a8_fused_experts(*(a.cuda() for a in args))
    nonzero = got.abs().sum(1).nonzero().flatten().tolist()
    assert nonzero == [3]


@needs_gpu
@pytest.mark.parametrize("mode", MODES)
def test_gpu_runs_in_a_graph_with_other_ids(mode: reference.ActivationScale) -> None:
    args = [a.cuda() for a in layer(50, 8, 4)]
    scales = torch.tensor([0.01]).cuda(), torch.tensor([0.02]).cuda()
    moe.w4a8_fused_experts(*args, mode, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe.w4a8_fused_experts(*args, mode, *scales)
    for _ in range(3):
        args[0].normal_()
        args[6].random_(-2, 9)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, moe.w4a8_fused_experts(*args, mode, *scales))


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
def test_gpu_compiles() -> None:
    args = [a.cuda() for a in layer(9, 4, 2)]
    compiled = torch.compile(lambda *a: moe.w4a8_fused_experts(*a) * 2, fullgraph=True)
    assert torch.equal(compiled(*args), moe.w4a8_fused_experts(*args) * 2)
