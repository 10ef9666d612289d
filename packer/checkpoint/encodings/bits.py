"""Codes of fewer than 8 bits out of the words that hold them."""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble in which column c of every eight lies
# Values of the 16 codes of FP4 E2M1; the highest bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def along_rows(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes that follow one another in the words of a row, lowest bits first, also across the borders of words.

    Args:
        words: int32 or uint8 [R, W].
        bits: Bits of a code, 1 to 8.
        count: Codes in a row.

    Returns:
        uint8 [R, count].
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :count]
    if bits == 4:
        return torch.stack((octets & 15, octets >> 4), -1).reshape(len(octets), -1)[:, :count]
    if bits == 2:
        parts = [(octets >> shift) & 3 for shift in (0, 2, 4, 6)]
        return torch.stack(parts, -1).reshape(len(octets), -1)[:, :count]
    starts = torch.arange(count) * bits
    wide = torch.nn.functional.pad(octets, (0, 2)).to(torch.int32)
    first = starts // 8
    pairs = wide[:, first] | (wide[:, first + 1] << 8)
    return ((pairs >> (starts % 8)) & ((1 << bits) - 1)).to(torch.uint8)


def along_columns(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes that follow one another down the words of a column: [W, C] -> uint8 [count, C]."""
    return along_rows(words.T, bits, count).T


def awq_columns(words: torch.Tensor, columns: slice) -> torch.Tensor:
    """Some columns of int4 codes [R, 8 W] in AWQ's order of nibbles: uint8 [R, columns]."""
    index = torch.arange(columns.start, columns.stop, columns.step)
    shifts = torch.tensor(AWQ_ORDER, dtype=torch.int32)[index % 8] * 4
    return ((words[:, index // 8] >> shifts) & 15).to(torch.uint8)


def packed_words(count: int, bits: int) -> int:
    """Words of 32 bits that `count` codes fill."""
    return -(-count * bits // 32)
