"""The operators of expert layers: gate and up, activation, down and the weighted sum in one call.

Weights are packed tensors as they lie in the file (docs/format.md): `w13` stacks gate and up of each expert, gate
first, each padded to whole blocks for itself; the kind is that of the dtype: bf16, int8 (activations int8),
float8_e4m3fn (blocks of 128 x 128, activations bf16) or uint8 (int4 with zero points), unless `packing` names it.
`tilewright.kernels.ops.reference_experts` states the arithmetic. A token gives the same bits whatever the batch and the
number of threads.

Axes: T tokens, H hidden size, I inner size of an expert, E experts of the stack, k choices per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native  # noqa: F401  (loads the operators)
from . import fakes

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
_FUSED_EXPERTS, _FUSED_EXPERTS_OUT = torch.ops.tilewright.fused_experts.default, torch.ops.tilewright.fused_experts.out
_FUSED_MLP, _FUSED_MLP_OUT = torch.ops.tilewright.fused_mlp.default, torch.ops.tilewright.fused_mlp.out
# The last arguments where all are at their defaults: then they are left out, for torch looks for an override in every
# argument that it is given, which takes longer than to fill in a default.
USUAL_EXPERTS = tuple(argument.default_value for argument in _FUSED_EXPERTS._schema.arguments[12:])
USUAL_MLP = tuple(argument.default_value for argument in _FUSED_MLP._schema.arguments[12:])


def fused_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    inner: int,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    routed_scale: float = 1.0,
    int8_activations: bool = True,
    first_expert: int = 0,
    activation_group: int = 0,
    w13_rotation: int = 0,
    w2_rotation: int = 0,
    packing: str = "",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Routed experts: `y = routed_scale * Σ weight * W2(act(gate(x)) * up(x))`, summed in fp32, rounded once.

    Args:
        x: fp32, bf16 or fp16 [T, H].
        topk_weights: fp32 [T, k].
        topk_ids: int32 or int64 [T, k]; one outside of the stack (such as -1) contributes nothing.
        w13: Packed gate and up, [E, 2I', ..].
        w2: Packed down, [E, H', ..].
        inner: I.
        w13_scale: fp32; int8 [E, 2I', 1], fp8 [E, 2 ceil(I / 128), ceil(H / 128)], int4 [E, blocks, groups, 32].
        w2_scale: The same for `w2`.
        w13_zeros: int8 [E, blocks, groups, 32] zero points of int4.
        w2_zeros: The same for `w2`.
        w13_bias: fp32 [E, 2I], gate first.
        w2_bias: fp32 [E, H].
        activation: One of `ACTIVATIONS`.
        alpha: Slope of `clamped_swiglu`.
        limit: Bound of `clamped_swiglu`.
        routed_scale: Factor of the result.
        int8_activations: Of int4: quantize activations to int8 by row (W4A8), or round them to bf16 (W4A16).
        first_expert: Number of the stack's first expert.
        activation_group: Columns that share a scale of int8 activations, 64 or 128; 0: the whole row (`linear_int8`).
        w13_rotation: Columns of a block of `x` that a Hadamard matrix multiplies before rounding; 0: none.
        w2_rotation: The same for what lies between the products.
        packing: `mxfp4` or `int4-compact` for uint8 weights in layouts of that name, which hold their scales.
        out: Takes the result: contiguous, of its shape and dtype; must not share memory with an input.

    Returns:
        [T, H] in the dtype of `x`; `out` if that is given.

    Raises:
        RuntimeError: A shape, dtype or activation is not one of these; the message names it.
    """
    tensors = (
        x,
        topk_weights,
        topk_ids,
        w13,
        w2,
        inner,
        w13_scale,
        w2_scale,
        w13_zeros,
        w2_zeros,
        w13_bias,
        w2_bias,
    )
    gating = activation, alpha, limit, routed_scale
    rest = (*gating, int8_activations, first_expert, activation_group, w13_rotation, w2_rotation, packing)
    arguments = tensors if rest == USUAL_EXPERTS else (*tensors, *rest)
    if out is not None:
        _FUSED_EXPERTS_OUT(*arguments, out=out)
        return out
    result: Tensor = _FUSED_EXPERTS(*arguments)
    return result


def fused_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    inner: int,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    fused_out: Tensor | None = None,
    gate: Tensor | None = None,
    fused_scale: float = 1.0,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    int8_activations: bool = True,
    activation_group: int = 0,
    w13_rotation: int = 0,
    w2_rotation: int = 0,
    packing: str = "",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The expert of every token, and the routed ones' output: `sigmoid(gate) * expert(x) + fused_scale * fused_out`.

    `x` is not changed: the routed experts may still need it.

    Args:
        x: fp32, bf16 or fp16 [.., H], T tokens in all.
        w13: Packed gate and up [2I', ..], or a stack of one.
        w2: Packed down [H', ..].
        inner: I.
        w13_scale: As in `fused_experts`, without the axis of experts.
        w2_scale: The same for `w2`.
        w13_zeros: Zero points of int4.
        w2_zeros: The same for `w2`.
        w13_bias: fp32 [2I], gate first.
        w2_bias: fp32 [H].
        fused_out: Of the shape and dtype of `x`; None adds nothing.
        gate: Logits [T, 1], fp32, bf16 or fp16; None means no gate.
        fused_scale: Factor of `fused_out`.
        activation: One of `ACTIVATIONS`.
        alpha: Slope of `clamped_swiglu`.
        limit: Bound of `clamped_swiglu`.
        int8_activations: Of int4: W4A8 or W4A16.
        activation_group: As in `fused_experts`, like the two rotations.
        w13_rotation: Of `x`.
        w2_rotation: Of what lies between the products.
        packing: As in `fused_experts`.
        out: Takes the result, as in `fused_experts`; may be `fused_out` itself.

    Returns:
        [.., H] in the dtype of `x`, rounded once; `out` if that is given.

    Raises:
        RuntimeError: A shape, dtype or activation is not one of these; the message names it.
    """
    tensors = (
        x,
        w13,
        w2,
        inner,
        w13_scale,
        w2_scale,
        w13_zeros,
        w2_zeros,
        w13_bias,
        w2_bias,
        fused_out,
        gate,
    )
    gating = fused_scale, activation, alpha, limit
    rest = (*gating, int8_activations, activation_group, w13_rotation, w2_rotation, packing)
    arguments = tensors if rest == USUAL_MLP else (*tensors, *rest)
    if out is not None:
        _FUSED_MLP_OUT(*arguments, out=out)
        return out
    result: Tensor = _FUSED_MLP(*arguments)
    return result


def _fake_experts(x: Tensor, *_rest: object, **_named: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _name in ("fused_experts", "fused_mlp"):
    fakes.register(_name, _fake_experts)
    fakes.register(f"{_name}.out", fakes.nothing)
