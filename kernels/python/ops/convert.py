"""The operators of conversion: maxima, codes, errors, nibbles, packed blocks; each gives the bits of its formula.

`packer.solvers.blocks` and `.mse` state the formulas of numbers, docs/format.md those of bytes. Operators read fp32,
bf16 and fp16 weights as they lie, rows any number of elements apart, without an fp32 copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native  # noqa: F401  # loads the library
from ..formats import WeightFormat

GRIDS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "int4"}  # codes as checkpoints store them
READ = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
ROWS_AT_ONCE = 64  # of which `all_finite` takes the maximum together


def block_amax(weight: Tensor, fmt: WeightFormat) -> Tensor:
    """Largest magnitude of each block of a weight [N, K]: fp32 [scale_rows, scale_columns].

    Infinity and NaN carry through.
    """
    result: Tensor = torch.ops.tilewright.block_amax(_rows(weight), fmt.block_n, fmt.block_k)
    return result


def all_finite(values: Tensor) -> bool:
    """Whether a tensor of any shape holds no NaN and no infinity; read once, at the speed of memory.

    Args:
        values: fp32, bf16, fp16 or e4m3fn; other floats are read more slowly, integers not at all.
    """
    if not values.dtype.is_floating_point or values.numel() == 0:
        return True
    if values.dtype not in READ:
        return bool(torch.isfinite(values.to(torch.float32)).all())
    rows = _rows(values.reshape(-1, values.shape[-1] if values.dim() else 1))
    maxima: Tensor = torch.ops.tilewright.block_amax(rows, ROWS_AT_ONCE, 0)
    return bool(torch.isfinite(maxima).all())


def encode(weight: Tensor, scales: Tensor, fmt: WeightFormat) -> Tensor:
    """Codes [N, K] of a finite weight [N, K] under scales fp32 [scale_rows, scale_columns], in `fmt.code_dtype`.

    RNE of the fp32 quotient, cut off at the largest codes. For formats with a `native` grid.
    """
    grid, scales = fmt.native, scales.contiguous()
    result: Tensor = torch.ops.tilewright.encode(_rows(weight), scales, grid, fmt.block_n, fmt.block_k)
    return result


def squared_error(weight: Tensor, scales: Tensor, fmt: WeightFormat) -> Tensor:
    """Sum over each block of `(round(w / s) * s - w)^2`, added up in halves: fp32 [scale_rows, scale_columns].

    For formats with a `native` grid.
    """
    grid, scales = fmt.native, scales.contiguous()
    result: Tensor = torch.ops.tilewright.squared_error(_rows(weight), scales, grid, fmt.block_n, fmt.block_k)
    return result


def code_errors(weight: Tensor, codes: Tensor, scales: Tensor, ideal: Tensor, fmt: WeightFormat) -> Tensor:
    """What verification measures of each block of a quantized weight beside its source; see `BlockMeasures` in packer.

    For formats with a `native` grid.

    Args:
        weight: The source, fp32, bf16 or fp16 [N, K].
        codes: `fmt.code_dtype` [N, K].
        scales: fp32 [scale_rows, scale_columns], those of the codes.
        ideal: fp32 of the same shape, above zero: those that the format's own rule gives for the source.
        fmt: The format.

    Returns:
        float64 [scale_rows, scale_columns, 7]: sums of squares of the difference, the source, half a step, and the
        error of the nearest code, the latter two under `ideal`; numbers further than half a step from their code; the
        largest difference; the largest code.
    """
    grid, scales = fmt.native, scales.contiguous()
    result: Tensor = torch.ops.tilewright.code_errors(
        _rows(weight), codes.contiguous(), scales, ideal.contiguous(), grid, fmt.block_n, fmt.block_k
    )
    return result


def scale_codes(codes: Tensor, scales: Tensor, block_n: int, block_k: int, first_row: int = 0) -> Tensor:
    """Values of some rows of a quantized weight, `code * scale` in fp32.

    Args:
        codes: e4m3fn, int8, or uint8 around 8, [rows, K].
        scales: fp32 [scale_rows, scale_columns] of the whole weight.
        block_n: Rows that share a scale, 0 for all.
        block_k: Columns that share a scale, 0 for all.
        first_row: Where `codes` begins in the whole weight.

    Returns:
        fp32 [rows, K].
    """
    grid = GRIDS[codes.dtype]
    result: Tensor = torch.ops.tilewright.scale_codes(
        _rows(codes), scales.contiguous(), grid, block_n, block_k, first_row if block_n else 0
    )
    return result


def join_nibbles(codes: Tensor) -> Tensor:
    """uint8 [.., K] codes 0..15 -> uint8 [.., K / 2]; byte j = codes[2j] | codes[2j + 1] << 4."""
    result: Tensor = torch.ops.tilewright.join_nibbles(codes.contiguous())
    return result


def split_nibbles(joined: Tensor, flip: int = 0) -> Tensor:
    """The inverse of `join_nibbles`: uint8 [.., K / 2] -> uint8 [.., K], each code xor-ed with `flip`."""
    result: Tensor = torch.ops.tilewright.split_nibbles(joined.contiguous(), flip)
    return result


def pack_words(codes: Tensor, parts: int, columns: int, word: int, compensation: bool = False) -> Tensor:
    """Blocks of 32 rows, word column by word column, as layouts cpu-vnni-bf16, -fp8 and -int8 have them.

    Args:
        codes: uint8, int8 or int16 [.., N, K].
        parts: Equal parts of the rows, padded with zeros to whole blocks each for itself.
        columns: Columns after padding with zeros.
        word: Bytes of a row that stay together, 2 or 4.
        compensation: Let 128 times the sum of each row of int8 codes follow its block.

    Returns:
        [.., parts * ceil(N / parts / 32) * 32, columns (+ 4)] in the dtype of `codes`.
    """
    *lead, n, k = codes.shape
    split = codes.reshape(-1, n // parts, k).contiguous()
    packed: Tensor = torch.ops.tilewright.pack_words(split, columns, word, compensation)
    return packed.reshape(*lead, parts * packed.shape[1], packed.shape[2])


def pack_int4(codes: Tensor, zeros: Tensor, parts: int, block_k: int, group: int) -> Tensor:
    """Blocks of 32 rows and `block_k` columns with their sums, as layout cpu-vnni-int4 has them.

    Args:
        codes: uint8 [.., N, K], 0..15.
        zeros: uint8 [.., N, ceil(K / group)] zero points.
        parts: Equal parts of the rows, padded to whole blocks each for itself.
        block_k: Columns of a block; divides `group`.
        group: Columns that share a zero point.

    Returns:
        uint8 [.., blocks of rows, blocks of columns, 16 * block_k + 128].
    """
    *lead, n, k = codes.shape
    split = codes.reshape(-1, n // parts, k).contiguous()
    packed: Tensor = torch.ops.tilewright.pack_int4(split, zeros.contiguous(), block_k, group)
    return packed.reshape(*lead, -1, packed.shape[1], packed.shape[2])


def _rows(matrix: Tensor) -> Tensor:
    """The matrix with the elements of each row side by side."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
