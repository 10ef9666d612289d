"""What the GPU operators compute, in plain torch: the specification that tests compare with, and the way on a CPU.

Sums are in float64. FP8 rounding of activations is the operators' own, so that a comparison sees the products alone.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from ..formats import INT4_BY_GROUP
from ..layouts.gpu_hopper import GPU_HOPPER_W4

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
ActivationScale = Literal["static", "tensor", "token"]


def dense(tiles: torch.Tensor, scales: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """The weights [E, N, K] that lie in layout `gpu-hopper-w4`, in float64."""
    shape = (tiles.shape[0], tiles.shape[1] * 64, k)
    q = GPU_HOPPER_W4.unpack({"tiles": tiles, "scales": scales}, INT4_BY_GROUP[group], shape)
    assert q.scales is not None
    return (q.codes.to(torch.float64) - 8) * q.scales.to(torch.float64).repeat_interleave(group, -1)


def grouped_mm(
    x: torch.Tensor,
    tiles: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    a_scale: torch.Tensor,
    group: int = 128,
) -> torch.Tensor:
    """Out[m] = a_scale[m] * (x[m] @ w[e].T) for `offsets[e] <= m < offsets[e + 1]`: float64 [M, N], zero elsewhere.

    Args:
        x: float8_e4m3fn [M, K] activations, rows sorted by expert.
        tiles: uint8 [E, N/64, T, 64, 64] weights of layout `gpu-hopper-w4`.
        scales: bf16 [E, 128T/group, N] weight scales of that layout.
        offsets: int32 [E + 1] first row of each expert, and the end of the last.
        a_scale: fp32 [1] or [M] activation scales.
        group: Columns that share a weight scale.
    """
    values = x.to(torch.float64) * a_scale.to(torch.float64).reshape(-1, 1)
    out = values.new_zeros(x.shape[0], tiles.shape[1] * 64)
    bounds = offsets.tolist()
    for e, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if first < last:
            out[first:last] = values[first:last] @ dense(tiles[e : e + 1], scales[e : e + 1], group, x.shape[1])[0].T
    return out


def activation_scales(x: torch.Tensor, mode: ActivationScale, static: torch.Tensor | None) -> torch.Tensor:
    """Fp32 [1] or [M]: the scale given, or the largest magnitude of all rows or each over 448; 1 where that is 0."""
    if mode == "static":
        assert static is not None
        return static.reshape(1)
    amax = x.abs().amax(-1) if x.numel() else x.new_zeros(x.shape[0])
    if mode == "tensor":
        amax = amax.max().reshape(1) if amax.numel() else amax.new_zeros(1)
    return torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Fp32 [M, K] over its scale, saturated, rounded to nearest even: float8_e4m3fn."""
    return (x / scale.reshape(-1, 1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mode: ActivationScale = "token",
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Out[t] = sum_j topk_weights[t, j] * expert[topk_ids[t, j]](x[t]): float64 [M, H].

    An expert is bf16(`w2 @ fp8(silu(gate) * up)`) with gate and up the halves of bf16(`w13 @ fp8(x)`). Ids outside
    0 .. E - 1 contribute nothing.

    Args:
        x: bf16 [M, H] tokens.
        w13: float64 [E, 2I, H] weights, gate rows first.
        w2: float64 [E, H, I] weights.
        topk_weights: fp32 [M, k].
        topk_ids: int [M, k].
        mode: Whose magnitude sets an activation scale; "tensor" is over the token-expert pairs that are computed.
        a1_scale: fp32 [1] scale of x, for mode "static".
        a2_scale: fp32 [1] scale of the hidden activations, for mode "static".
    """
    token, slot = torch.nonzero((topk_ids >= 0) & (topk_ids < w13.shape[0]), as_tuple=True)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    if not token.numel():
        return out
    expert = topk_ids[token, slot].long()
    rows = _rounded(x.to(torch.float32)[token], mode, a1_scale)
    hidden = torch.stack([w13[e] @ row for e, row in zip(expert.tolist(), rows, strict=True)])
    gate, up = hidden.to(torch.bfloat16).to(torch.float32).chunk(2, -1)
    rows = _rounded(F.silu(gate) * up, mode, a2_scale)
    results = torch.stack([w2[e] @ row for e, row in zip(expert.tolist(), rows, strict=True)])
    weighted = topk_weights[token, slot].to(torch.float64)[:, None] * results.to(torch.bfloat16).to(torch.float64)
    return out.index_add(0, token, weighted)


def _rounded(x: torch.Tensor, mode: ActivationScale, static: torch.Tensor | None) -> torch.Tensor:
    """What FP8 leaves of fp32 rows, in float64."""
    scale = activation_scales(x, mode, static)
    return quantize(x, scale).to(torch.float64) * scale.to(torch.float64).reshape(-1, 1)
