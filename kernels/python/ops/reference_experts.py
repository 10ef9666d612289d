"""What the operators over experts compute, in plain torch: the specification that the kernels are tested with.

Every fp32 operation is the promised one in the promised order, so where the products are integers (int8, int4 with int8
activations) an expert layer gives these bits, on every instruction set.

Axes: T tokens, H hidden size, I inner size of an expert, k choices per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Matrix = Callable[[Tensor], Tensor]
"""A weight as the function from fp32 [rows, K] to fp32 [rows, N] of its linear reference, bias included."""

ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds an fp32 number to an integer
EXP_TERMS = (0.001393454265780747, 0.008363776840269566, 0.04166645556688309, 0.16666573286056519, 0.5)
ERFC_TERMS = (
    0.15775100886821747,
    -0.7501815557479858,
    1.3186529874801636,
    -0.909740686416626,
    0.09432142972946167,
    -0.09025566279888153,
    0.06523264944553375,
    0.3803541362285614,
    0.9993481040000916,
    -1.2654823064804077,
)


def _polynomial(x: Tensor, terms: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, terms[0])
    for term in terms[1:]:
        value = value * x + term
    return value


def exponential(x: Tensor) -> Tensor:
    """e^x in fp32 to about one unit in the last place: 2^n e^r, |r| <= ln(2) / 2; 0 and infinity at the ends."""
    x = torch.where(x > 104, 104.0, torch.where(x < -104, -104.0, x))
    shifted = x * 1.44269504 + ROUND
    n = shifted - ROUND
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    e = (_polynomial(r, EXP_TERMS) * r) * r + r + 1
    power = n.nan_to_num().int()
    half = power >> 1
    for part in (half, power - half):
        e = e * ((part + 127) << 23).view(torch.float32)
    return e


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) in fp32."""
    return 1 / (1 + exponential(-x))


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)` in fp32, as one division."""
    return x / (1 + exponential(-x))


def gelu(x: Tensor) -> Tensor:
    """`x * Phi(x)` in fp32, Phi by the complementary error function, so that its tail keeps its digits."""
    z = x.abs() * 0.707106781
    t = 1 / (1 + 0.5 * z)
    tail = 0.5 * (t * exponential(_polynomial(t, ERFC_TERMS) - z * z))
    return x * torch.where(x < 0, tail, 1 - tail)


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of `gelu` by tanh, written with the logistic function: `x * sigmoid(2 u)`."""
    u = 1.59576912 * (x + 0.044715 * (x * x * x))
    return x / (1 + exponential(-u))


def gated(gate: Tensor, up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """`act(gate) * up` in fp32; `clamped_swiglu` is `(clamp(up) + 1) * g * sigmoid(alpha * g)`, `g = min(gate, limit)`.

    Args:
        gate: fp32 [.., I].
        up: fp32 [.., I].
        activation: `silu`, `gelu`, `gelu_tanh` or `clamped_swiglu`.
        alpha: Slope in `clamped_swiglu`.
        limit: Bound in `clamped_swiglu`: gate from above, up from both sides.

    Returns:
        fp32 [.., I].
    """
    if activation == "clamped_swiglu":
        slope, bound = torch.tensor(alpha), torch.tensor(limit)
        g = torch.where(gate > bound, bound, gate)
        u = torch.where(up > bound, bound, torch.where(up < -bound, -bound, up))
        return (u + 1) * (g / (1 + exponential(-(slope * g))))
    return {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}[activation](gate) * up


def expert(x: Tensor, w13: Matrix, w2: Matrix, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """One expert: fp32 [T, H] -> fp32 [T, H]; what goes between its two products is rounded to bf16."""
    gate, up = w13(x.float()).chunk(2, -1)
    return w2(gated(gate, up, activation, alpha, limit).bfloat16().float())


def fused_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: Callable[[int, Tensor], Tensor],
    routed_scale: float = 1.0,
) -> Tensor:
    """`Σ_e weight_e * expert_e(x) * routed_scale`, in fp32, experts in ascending order, rounded once.

    The order is that of the experts' numbers, so it does not matter in which order a router lists a token's choices.

    Args:
        x: fp32, bf16 or fp16 [T, H].
        topk_weights: fp32 [T, k].
        topk_ids: Integers [T, k]; -1 contributes nothing.
        experts: `expert` of a number and rows.
        routed_scale: Factor of the sum.

    Returns:
        [T, H] in the dtype of `x`.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for number in sorted(set(topk_ids.flatten().tolist()) - {-1}):
        token, choice = torch.where(topk_ids == number)
        y = experts(number, x[token])
        for c in range(topk_ids.shape[1]):  # a token that lists an expert twice counts it twice
            t = token[choice == c]
            total[t] += topk_weights[t, c, None] * y[choice == c]
    return (total * torch.tensor(routed_scale)).to(x.dtype)


def fused_mlp(
    shared: Tensor,
    dtype: torch.dtype,
    fused_out: Tensor | None = None,
    gate: Tensor | None = None,
    fused_scale: float = 1.0,
) -> Tensor:
    """`sigmoid(gate) * shared + fused_out * fused_scale` in fp32, rounded once.

    Args:
        shared: fp32 [T, H], what `expert` gives.
        dtype: Of the result.
        fused_out: The routed experts' output [T, H].
        gate: Logits [T, 1].
        fused_scale: Factor of `fused_out`.

    Returns:
        [T, H] in `dtype`.
    """
    total = shared if gate is None else sigmoid(gate.float()) * shared
    if fused_out is not None:
        total = total + fused_out.float() * torch.tensor(fused_scale)
    return total.to(dtype)
