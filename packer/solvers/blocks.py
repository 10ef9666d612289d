"""The arithmetic that every solver shares: scales and codes of one fp32 weight [N, K].

All of it is elementwise fp32 or a maximum, so that any implementation that follows the formulas gives the same bits:
on a CPU the native operators of `tilewright.kernels.ops.convert` do the work, elsewhere the formulas themselves.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from tilewright.kernels.formats import WeightFormat
from tilewright.kernels.ops import convert


def block_view(weight: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """The weight cut into blocks [scale_rows, block_n, scale_columns, block_k].

    Partial blocks at the edges are filled up with zeros, which change neither a maximum nor a sum of squares.
    """
    n, k = weight.shape
    block_k = fmt.block_k or k
    rows, columns = fmt.scale_rows(n), fmt.scale_columns(k)
    pad_n, pad_k = rows * fmt.block_n - n, columns * block_k - k
    if pad_n or pad_k:
        weight = F.pad(weight, (0, pad_k, 0, pad_n))
    return weight.reshape(rows, fmt.block_n, columns, block_k)


def block_amax(weight: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Largest magnitude of each block, fp32 [scale_rows, scale_columns]; NaN and infinity carry through."""
    return convert.block_amax(weight, fmt) if _native(weight) else block_amax_formula(weight, fmt)


def block_amax_formula(weight: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """What `block_amax` computes."""
    return block_view(weight.abs(), fmt).amax((1, 3)).to(torch.float32)


def _native(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() > 0


def scales_from_amax(amax: torch.Tensor, fmt: WeightFormat, fraction: float = 1.0) -> torch.Tensor:
    """Scales fp32 [scale_rows, scale_columns] for blocks of these largest magnitudes: `fmt.scales`."""
    return fmt.scales(amax, fraction)


def expand(scales: torch.Tensor, fmt: WeightFormat, n: int, k: int) -> torch.Tensor:
    """Scales spread over rows (and columns): fp32 [N, K], or [N, 1] where a row has one scale."""
    rows = scales if fmt.block_n == 1 else scales.repeat_interleave(fmt.block_n, 0)[:n]
    return rows if not fmt.block_k else rows.repeat_interleave(fmt.block_k, 1)[:, :k]


def encode(weight: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """Codes [N, K] of a weight under given scales: `fmt.encode(w / s)`, the quotient being a true fp32 division."""
    native = fmt.native and _native(weight)
    return convert.encode(weight, scales, fmt) if native else encode_formula(weight, scales, fmt)


def encode_formula(weight: torch.Tensor, scales: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """What `encode` computes."""
    return fmt.encode(weight / expand(scales, fmt, *weight.shape))
