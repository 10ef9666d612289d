"""What each operator computes, in plain torch on unpacked weights: the specification that the kernels are tested with.

Integer products are exact (int64). Where an operator promises bits, the fp32 operations here are the promised ones in
the promised order; sums of bf16 products may be taken in any order, so those references sum in float64.

Axes: M tokens, N output features, K input features, G groups of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import MXFP4
from ..rotation import rotate

FP8_BLOCK = 128


def quantize_rows(x: Tensor, activation_group: int = 0, rotation: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric int8: `q = round_half_even(x * (127 / amax))`, `amax = max(|x|, 1e-7)`, all in fp32.

    Args:
        x: fp32, bf16 or fp16 [M, K].
        activation_group: Columns that share a scale; 0: the whole row. The last group may have fewer.
        rotation: Columns of a block that a Hadamard matrix multiplies first (`rotation.rotate`); 0: none.

    Returns:
        int64 [M, K] codes in -127..127 and fp32 [M, S] multipliers `amax / 127`, one for each group.
    """
    values = rotate(x.float(), rotation) if rotation else x.float()
    codes, multipliers = [], []
    for part in values.split(activation_group or max(values.shape[1], 1), 1):
        amax = part.abs().amax(-1, keepdim=True).clamp(min=1e-7)
        inverse = torch.tensor(127.0) / amax  # a Python scalar would become a multiplication by a reciprocal
        codes.append(torch.round(part * inverse).long())
        multipliers.append(amax / torch.tensor(127.0))
    return torch.cat(codes, 1), torch.cat(multipliers, 1)


def fused_multiply_add(dot: Tensor, factor: Tensor, total: Tensor) -> Tensor:
    """`dot * factor + total` rounded to fp32 once; dot integers below 2^29, factor and total fp32.

    The product is exact in float64. Their sum is rounded to odd there, so that rounding it to fp32 is the only rounding
    that counts (S. Boldo and G. Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    product, addend = dot.double() * factor.double(), total.double()
    sum64 = product + addend
    back = sum64 - product
    error = (product - (sum64 - back)) + (addend - back)
    bits = sum64.view(torch.int64)
    inexact = sum64.isfinite() & (error != 0) & (bits & 1 == 0)
    toward = torch.where((error > 0) == (sum64 > 0), 1, -1)
    return (bits + torch.where(inexact, toward, 0)).view(torch.float64).float()


def _finish(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if bias is None else y + bias).to(dtype)


def linear_bf16(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`bf16(x) · weightᵀ + bias`; weight bf16 [N, K]."""
    y = x.bfloat16().double() @ weight.double().T
    return _finish(y.float(), bias, x.dtype)


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation_group: int = 0,
    rotation: int = 0,
) -> Tensor:
    """Int8 weight [N, K] with scales fp32 [N], exact: `float(q · weightᵀ) * row_scale * scale + bias`.

    With `activation_group`, `s * scale + bias`, where s takes up the groups of columns in their order, each in one
    rounding: `s = fma(float(q_g · weight_gᵀ), row_scale_g, s)`. `rotation` as in `quantize_rows`.
    """
    q, row_scale = quantize_rows(x, activation_group, rotation)
    if not activation_group:
        return _finish((q @ weight.long().T).float() * row_scale * scale.reshape(-1), bias, x.dtype)
    y = torch.zeros(x.shape[0], weight.shape[0])
    parts = zip(q.split(activation_group, 1), weight.long().split(activation_group, 1), strict=True)
    for g, (part_q, part_w) in enumerate(parts):
        y = fused_multiply_add(part_q @ part_w.T, row_scale[:, g : g + 1], y)
    return _finish(y * scale.reshape(-1), bias, x.dtype)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`Σ_g (bf16(x)_g · weight_gᵀ) * scale_g + bias` over 128-column groups; scale fp32 [ceil(N/128), ceil(K/128)]."""
    n, k = weight.shape
    values = x.bfloat16().double()
    rows = scale.repeat_interleave(FP8_BLOCK, 0)[:n]
    y = torch.zeros(x.shape[0], n)
    for g, k0 in enumerate(range(0, k, FP8_BLOCK)):
        part = values[:, k0 : k0 + FP8_BLOCK] @ weight[:, k0 : k0 + FP8_BLOCK].double().T
        y = y + part.float() * rows[:, g]
    return _finish(y, bias, x.dtype)


def linear_mxfp4(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`bf16(x) · (value * scale)ᵀ + bias`; codes uint8 [N, K] of E2M1, scale fp32 [N, ceil(K / 32)] powers of two."""
    spread = scale.repeat_interleave(MXFP4.block_k, 1)[:, : codes.shape[1]]
    y = x.bfloat16().double() @ (MXFP4.decode(codes) * spread).double().T
    return _finish(y.float(), bias, x.dtype)


def linear_int4(
    x: Tensor,
    codes: Tensor,
    zeros: Tensor,
    scale: Tensor,
    group: int,
    bias: Tensor | None = None,
    int8_activations: bool = True,
    activation_group: int = 0,
    rotation: int = 0,
) -> Tensor:
    """Int4 weight with groups: `Σ_g float(a_g · (codes - zeros)_gᵀ) * scale_g`, g ascending, then `* row_scale + bias`.

    With int8 activations (exact) `a` are the codes of `quantize_rows`; otherwise `a = bf16(x)`, without a row scale.
    With `activation_group`, s takes up the groups by `fma(float(a_g · (codes - zeros)_gᵀ), scale_g * row_scale_g, s)`;
    columns that share an activation scale are no fewer than those that share a weight's.

    Args:
        x: fp32, bf16 or fp16 [M, K].
        codes: uint8 [N, K], 0..15.
        zeros: [N, G] zero points.
        scale: fp32 [N, G], G = ceil(K / group).
        group: Columns that share a scale; the last group may have fewer.
        bias: fp32 [N].
        int8_activations: W4A8 or W4A16.
        activation_group: As in `quantize_rows`, of W4A8.
        rotation: As in `quantize_rows`, of both.

    Returns:
        [M, N] in the dtype of `x`.
    """
    signed = codes.long() - zeros.long().repeat_interleave(group, 1)[:, : codes.shape[1]]
    shared = max(activation_group, group) if activation_group else 0
    q, row_scale = quantize_rows(x, shared, rotation)
    values = rotate(x.float(), rotation) if rotation else x
    a = q if int8_activations else values.bfloat16().double()
    y = torch.zeros(x.shape[0], codes.shape[0])
    for g, (part_a, part_w) in enumerate(zip(a.split(group, 1), signed.split(group, 1), strict=True)):
        dot = part_a @ part_w.to(a.dtype).T
        if activation_group:
            at = g * group // shared
            y = fused_multiply_add(dot, scale[:, g] * row_scale[:, at : at + 1], y)
        else:
            y = y + dot.float() * scale[:, g]
    whole_row = int8_activations and not activation_group
    return _finish(y * row_scale if whole_row else y, bias, x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`weight * round(x * (1 / sqrt(sum / K + epsilon)))` in fp32, rounded to the dtype of `x`, then to the result's.

    `sum` adds up the squares in 32 parts, column i to part i % 32, and then the halves of the parts.

    Args:
        x: fp32, bf16 or fp16 [M, K].
        weight: fp32, bf16 or fp16 [K].
        epsilon: Rounded to fp32.

    Returns:
        [M, K] in the dtype that both have, or fp32.
    """
    values, k = x.float(), x.shape[-1]
    parts = torch.zeros(x.shape[0], 32)
    for start in range(0, k, 32):
        squares = values[:, start : start + 32] * values[:, start : start + 32]
        parts[:, : squares.shape[1]] += squares
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    mean = parts / torch.tensor(float(k)) + torch.tensor(epsilon, dtype=torch.float32)
    scale = torch.tensor(1.0) / mean.double().sqrt().float()  # torch's root in fp32 may be off by its last bit
    return (values * scale).to(x.dtype) * weight


def attend(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`softmax(scale * q · keyᵀ) · value` in float64: the operator's fp32 steps may take any order.

    Args:
        q: [B, H, 1, D].
        key: [B, H', T, D]; head h of `q` sees head h // (H / H').
        value: [B, H', T, D'].
        scale: Factor of the scores.

    Returns:
        float64 [B, 1, H, D'].
    """
    group = q.shape[1] // key.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (key, value))
    weights = (q.double() @ keys.transpose(-1, -2) * scale).softmax(-1)
    return (weights @ values).transpose(1, 2)
