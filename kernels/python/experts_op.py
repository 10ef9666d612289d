"""The operator of routed experts: one call for all experts of a layer, so that a compiler need not look inside.

`torch.ops.tilewright.experts` takes each stack as a list of tensors in the order of its kernel's `suffixes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .linear_kernels import LINEAR_KERNELS, LinearKernel

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


@torch.library.custom_op("tilewright::experts", mutates_args=())
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Sequence[Tensor],
    w13_bias: Tensor | None,
    w13_layout: str,
    w2: Sequence[Tensor],
    w2_bias: Tensor | None,
    w2_layout: str,
    inner: int,
    first_expert: int,
    activation: str,
) -> Tensor:
    """`y = sum_k weight_k * W2[id_k] (act(gate) * up)` with `gate, up = W13[id_k] x`.

    The activation is computed in fp32 and rounded to bf16 before the second product; routing weights are applied in
    fp32, experts are added in ascending order in fp32, and the sum is rounded once.

    Args:
        x: fp32, bf16 or fp16 [T, H].
        ids: Expert numbers, integers [T, k]; one outside of this stack (such as -1) contributes nothing.
        weights: Routing weights [T, k].
        w13: Packed gate and up of every expert, gate first, each padded on its own.
        w13_bias: fp32 [E, 2 * inner] or None.
        w13_layout: Their layout.
        w2: Packed down of every expert.
        w2_bias: fp32 [E, H] or None.
        w2_layout: Its layout.
        inner: Rows of gate, of up, and columns of down.
        first_expert: Number of the first expert of this stack.
        activation: A key of `ACTIVATIONS`.

    Returns:
        [T, H] in the dtype of `x`.
    """
    upper, lower = LINEAR_KERNELS[w13_layout], LINEAR_KERNELS[w2_layout]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    scores = weights.to(torch.float32)
    for number in torch.unique(ids).tolist():
        expert = number - first_expert
        if not 0 <= expert < w13[0].shape[0]:
            continue
        token, slot = torch.where(ids == number)
        halves = _gate_and_up(upper, x[token], [t[expert] for t in w13], w13_bias, expert, inner)
        gate, up = (half.to(torch.float32) for half in halves)
        hidden = (ACTIVATIONS[activation](gate) * up).to(torch.bfloat16)
        bias = None if w2_bias is None else w2_bias[expert]
        y = lower.run(hidden, [t[expert] for t in w2], x.shape[-1], bias)
        total.index_add_(0, token, y.to(torch.float32) * scores[token, slot, None])
    return total.to(x.dtype)


@experts.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Sequence[Tensor],
    w13_bias: Tensor | None,
    w13_layout: str,
    w2: Sequence[Tensor],
    w2_bias: Tensor | None,
    w2_layout: str,
    inner: int,
    first_expert: int,
    activation: str,
) -> Tensor:
    return torch.empty_like(x)


def _gate_and_up(
    kernel: LinearKernel, x: Tensor, tensors: list[Tensor], bias: Tensor | None, expert: int, inner: int
) -> list[Tensor]:
    """Both halves for the rows of one expert: every tensor is made of equal runs for the parts along its first axis."""
    biases = [None, None] if bias is None else list(bias[expert].split(inner))
    return [kernel.run(x, [tensor.chunk(2)[part] for tensor in tensors], inner, biases[part]) for part in range(2)]
