"""What the CPU layouts share: blocks of 32 rows, each transposed so that a kernel reads it from front to end.

A word is the run of neighbouring columns that one multiply-add instruction consumes: 2 columns of 16-bit products, 4 of
8-bit products. A block holds, word column by word column, one word of each of its 32 rows.
"""

from __future__ import annotations

import torch

from ..formats import WeightFormat
from ..tensors import Reject

BLOCK_N = 32
BLOCK_K = 32


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def packed_rows(n: int, parts: int) -> int:
    """Rows after each of the `parts` equal parts of `n` rows is padded to whole blocks."""
    return parts * round_up(n // parts, BLOCK_N)


def row_unit(fmt: WeightFormat) -> int:
    """Rows of whole blocks of rows and scales: packed one by one, such matrices are the packed matrix of them all."""
    return max(BLOCK_N, fmt.block_n)


def check_shape(layout: str, shape: tuple[int, ...], parts: int) -> Reject | None:
    """Why `shape` is no weight [N, K] or [E, N, K] of `parts` equal parts of rows, or None if it is one."""
    if len(shape) not in {2, 3} or min(shape) < 1:
        return Reject(layout, f"shape {list(shape)} is not [N, K] or [E, N, K] with at least one of each")
    if shape[-2] % parts:
        return Reject(layout, f"N = {shape[-2]} rows are not {parts} equal parts")
    return None


def pad(matrix: torch.Tensor, parts: int, columns: int) -> torch.Tensor:
    """Pad each part's rows to whole blocks and the columns to `columns`, with zeros.

    Args:
        matrix: Integers or floats [.., N, C] of a type that zeros can be written to.
        parts: Equal parts of the rows, padded each for itself.
        columns: Columns of the result, at least C.

    Returns:
        [.., packed_rows(N, parts), columns] contiguous; the argument itself if nothing is to be padded.
    """
    *lead, n, k = matrix.shape
    rows = packed_rows(n, parts)
    if (rows, columns) == (n, k):
        return matrix.contiguous()
    padded = matrix.new_zeros(*lead, parts, rows // parts, columns)
    padded[..., : n // parts, :k] = matrix.reshape(*lead, parts, n // parts, k)
    return padded.reshape(*lead, rows, columns)


def crop(matrix: torch.Tensor, n: int, parts: int, columns: int) -> torch.Tensor:
    """The inverse of `pad`: [.., N, columns] contiguous out of [.., packed_rows(N, parts), C]."""
    *lead, rows, k = matrix.shape
    split = matrix.reshape(*lead, parts, rows // parts, k)
    return split[..., : n // parts, :columns].reshape(*lead, n, columns).contiguous()


def deinterleave(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows out of blocks: words [.., N / 32, W, 32] -> `dtype` [.., N, K]."""
    *lead, blocks, _, _ = words.shape
    rows = words.transpose(-1, -2).contiguous().view(dtype)
    return rows.reshape(*lead, blocks * BLOCK_N, -1)
