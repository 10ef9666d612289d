"""The operator `tilewright::w4a8_fused_experts`: a whole mixture of experts with int4 weights and FP8 activations.

Sort and quantize by expert, product, silu and multiply with requantization, product, weighted sum. Everything stays on
the device, so the operator can be captured in a CUDA graph. Buffers are sized for the case that every pair of a token
and an expert is computed here.
"""

from __future__ import annotations

import contextlib

import torch

from ..errors import LayoutError
from . import reference
from .grouped import LIBRARY, w4a8_grouped_mm

with contextlib.suppress(ImportError):  # CPU builds of torch come without Triton
    import triton

    from . import moe_kernels

MODES = ("static", "tensor", "token")
SUM_WIDTH = 1024

LIBRARY.define(
    "w4a8_fused_experts(Tensor x, Tensor tiles13, Tensor scales13, Tensor tiles2, Tensor scales2, Tensor topk_weights, "
    "Tensor topk_ids, str mode='token', Tensor? a1_scale=None, Tensor? a2_scale=None, int group=128, "
    "int total_experts=0) -> Tensor"
)


def w4a8_fused_experts(
    x: torch.Tensor,
    tiles13: torch.Tensor,
    scales13: torch.Tensor,
    tiles2: torch.Tensor,
    scales2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mode: reference.ActivationScale = "token",
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    group: int = 128,
    total_experts: int = 0,
) -> torch.Tensor:
    """Out[t] = sum_j topk_weights[t, j] * w2[e] @ fp8(silu(gate) * up), with gate, up = halves of w13[e] @ fp8(x[t]).

    The expert is e = topk_ids[t, j]; ids outside 0 .. E - 1 contribute nothing. On a CPU the reference runs.

    Args:
        x: bf16 [M, H] tokens.
        tiles13: Weight tiles of [E, 2I, H], gate rows first, in layout `gpu-hopper-w4`.
        scales13: Its scales.
        tiles2: Weight tiles of [E, H, I].
        scales2: Its scales.
        topk_weights: fp32 [M, k].
        topk_ids: int32 or int64 [M, k].
        mode: Where activation scales come from: "static" (`a1_scale`, `a2_scale`), the largest magnitude of all rows
            ("tensor") or of each row ("token").
        a1_scale: fp32 [1] scale of x, for mode "static".
        a2_scale: fp32 [1] scale of the hidden activations, for mode "static".
        group: Columns that share a weight scale.
        total_experts: Experts that the ids are drawn from, if more than are here; the kernel's sizes are chosen by the
            share that is. The result does not depend on it.

    Returns:
        bf16 [M, H].

    Raises:
        LayoutError: An operand does not have the dtype or shape above.
    """
    return torch.ops.tilewright.w4a8_fused_experts(  # type: ignore[no-any-return]
        x, tiles13, scales13, tiles2, scales2, topk_weights, topk_ids, mode, a1_scale, a2_scale, group, total_experts
    )


def _meta(
    x: torch.Tensor,
    tiles13: torch.Tensor,
    scales13: torch.Tensor,
    tiles2: torch.Tensor,
    scales2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mode: str = "token",
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    group: int = 128,
    total_experts: int = 0,
) -> torch.Tensor:
    if mode not in MODES:
        raise LayoutError(f"w4a8_fused_experts: mode `{mode}` is not one of {', '.join(MODES)}")
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        raise LayoutError(f"w4a8_fused_experts: `x` is {x.dtype} {list(x.shape)}, not bf16 [M, H]")
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[:1] != x.shape[:1] or topk_ids.dim() != 2:
        shapes = f"{list(topk_ids.shape)} and {list(topk_weights.shape)}"
        raise LayoutError(f"w4a8_fused_experts: ids and weights are {shapes}, not both [{x.shape[0]}, k]")
    if topk_ids.dtype not in {torch.int32, torch.int64} or topk_weights.dtype != torch.float32:
        got = f"{topk_ids.dtype} and {topk_weights.dtype}"
        raise LayoutError(f"w4a8_fused_experts: ids and weights are {got}, not integers and fp32")
    if (tiles2.shape[1] * 64, tiles2.shape[0]) != (x.shape[1], tiles13.shape[0]):
        raise LayoutError(
            f"w4a8_fused_experts: w2 gives {tiles2.shape[1] * 64} columns from {tiles2.shape[0]} experts, but x has "
            f"{x.shape[1]} and w13 {tiles13.shape[0]}"
        )
    for name, scale in (("a1_scale", a1_scale), ("a2_scale", a2_scale)):
        if mode == "static" and (scale is None or scale.dtype != torch.float32 or scale.numel() != 1):
            raise LayoutError(f"w4a8_fused_experts: mode `static` needs `{name}`, one fp32 number")
    return torch.empty_like(x)


def _cpu(
    x: torch.Tensor,
    tiles13: torch.Tensor,
    scales13: torch.Tensor,
    tiles2: torch.Tensor,
    scales2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mode: reference.ActivationScale = "token",
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    group: int = 128,
    total_experts: int = 0,
) -> torch.Tensor:
    _meta(x, tiles13, scales13, tiles2, scales2, topk_weights, topk_ids, mode, a1_scale, a2_scale, group)
    w13 = reference.dense(tiles13, scales13, group, x.shape[1])
    w2 = reference.dense(tiles2, scales2, group, w13.shape[1] // 2)
    return reference.fused_experts(x, w13, w2, topk_weights, topk_ids, mode, a1_scale, a2_scale).to(torch.bfloat16)


def _cuda(
    x: torch.Tensor,
    tiles13: torch.Tensor,
    scales13: torch.Tensor,
    tiles2: torch.Tensor,
    scales2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mode: str = "token",
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    group: int = 128,
    total_experts: int = 0,
) -> torch.Tensor:
    out = _meta(x, tiles13, scales13, tiles2, scales2, topk_weights, topk_ids, mode, a1_scale, a2_scale, group)
    if not topk_ids.numel():
        return out.zero_()
    x, topk_ids, topk_weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    with torch.cuda.device(x.device):
        experts = tiles13.shape[0]
        expected_rows = -(-topk_ids.numel() * experts // max(experts, total_experts))
        rows, scale, offsets, positions, amax = _sort(x, topk_ids, experts, mode, a1_scale)
        hidden = w4a8_grouped_mm(rows, tiles13, scales13, offsets, scale, group, expected_rows)
        rows, scale = _activate(hidden, offsets, amax, mode, a2_scale)
        results = w4a8_grouped_mm(rows, tiles2, scales2, offsets, scale, group, expected_rows)
        grid = (x.shape[0], triton.cdiv(x.shape[1], SUM_WIDTH))
        moe_kernels.add_up[grid](
            results, positions, topk_weights, out, topk_ids.shape[1], H=x.shape[1], WIDTH=SUM_WIDTH
        )
    return out


def _scales(mode: str, rows: int, static: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Where the scales of `rows` rows are, or go."""
    if mode == "static":
        assert static is not None
        return static.reshape(1)
    return like.new_empty(rows if mode == "token" else 1, dtype=torch.float32)


def _sort(
    x: torch.Tensor, topk_ids: torch.Tensor, experts: int, mode: str, static: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 rows sorted by expert, their scales, first rows of the experts, positions of pairs, two running maxima."""
    (m, h), k = x.shape, topk_ids.shape[1]
    zeros = x.new_zeros(experts + 2, dtype=torch.int32)
    counts, amax = zeros[:experts], zeros[experts:].view(torch.float32)
    ranks, positions = topk_ids.new_empty(2, m * k, dtype=torch.int32)
    offsets = counts.new_empty(experts + 1)
    rows = x.new_empty(m * k, h, dtype=reference.FP8)
    scale = _scales(mode, m * k, static, x)
    width, padded_k = triton.next_power_of_2(h), triton.next_power_of_2(k)
    moe_kernels.count[(m,)](
        topk_ids, x, counts, ranks, amax, experts, k, H=h, K=padded_k, WIDTH=width, TENSOR=mode == "tensor", num_warps=8
    )
    moe_kernels.sort_and_quantize[(m,)](
        topk_ids,
        x,
        counts,
        ranks,
        amax,
        offsets,
        positions,
        rows,
        scale,
        experts,
        k,
        H=h,
        K=padded_k,
        E=triton.next_power_of_2(experts),
        WIDTH=width,
        MODE=mode,
        num_warps=8,
    )
    return rows, scale, offsets, positions, amax


def _activate(
    hidden: torch.Tensor, offsets: torch.Tensor, amax: torch.Tensor, mode: str, static: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows of silu(gate) * up, and their scales."""
    pairs, width = hidden.shape[0], hidden.shape[1] // 2
    rows = hidden.new_empty(pairs, width, dtype=reference.FP8)
    scale = _scales(mode, pairs, static, hidden)
    experts, padded = offsets.shape[0] - 1, triton.next_power_of_2(width)
    if mode == "tensor":
        moe_kernels.largest_activated[(pairs,)](hidden, offsets, amax[1:], experts, I=width, WIDTH=padded)
    moe_kernels.activate_and_quantize[(pairs,)](
        hidden, offsets, amax[1:], scale, rows, experts, I=width, WIDTH=padded, MODE=mode
    )
    return rows, scale


LIBRARY.impl("w4a8_fused_experts", _cuda, "CUDA")
LIBRARY.impl("w4a8_fused_experts", _cpu, "CPU")
torch.library.register_fake("tilewright::w4a8_fused_experts", _meta, lib=LIBRARY)
