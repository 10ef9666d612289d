"""The grouped product in plain Triton: for groups of 64 and 32, and for releases that Gluon was not tested with.

Same operands, same arithmetic: each group's products are summed in fp32 and scaled in fp32.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def decode(tiles):
    """Bytes of the layout's tiles to e4m3 numbers v * 2**-8, low and high columns."""
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 sign, rest;
        and.b32 sign, $2, 0x80808080; and.b32 rest, $2, 0x8E8E8E8E; shr.u32 sign, sign, 6; add.u32 $0, rest, sign;
        and.b32 sign, $2, 0x01010101; shr.u32 rest, $2, 3; and.b32 rest, rest, 0x0E0E0E0E;
        mad.lo.u32 $1, sign, 0x82, rest;
        }""",
        "=&r,=&r,r",
        [tiles],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def w4a8_grouped(
    x,
    tiles,
    scales,
    a_scale,
    out,
    offsets,
    E,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    """Out[m, n] = a_scale[m] * sum_g scales[e, g, n] * sum_k x[m, k] * w[e, n, k] for the rows m of every expert e.

    Program (i, j): weight rows BLOCK_N * j .., and the i-th block of at most BLOCK_M activation rows, counted over the
    experts; `EXPERTS` is the power of two that holds E.
    """
    T: tl.constexpr = (K + 127) // 128
    WIDTH: tl.constexpr = min(64, GROUP)  # columns that one product takes from each half of a tile
    experts = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + tl.minimum(experts, E))
    blocks = tl.cdiv(tl.load(offsets + tl.minimum(experts + 1, E)) - begin, BLOCK_M)
    ends = tl.cumsum(blocks, 0)
    i = tl.program_id(0)
    e = tl.sum((ends <= i).to(tl.int32), 0)
    if e < E:
        first = tl.load(offsets + e)
        last = tl.load(offsets + e + 1)
        m = first + (i - tl.sum(tl.where(experts < e, blocks, 0), 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = tl.minimum(m, last - 1).to(tl.int64) * K
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        safe_n = tl.minimum(n, N - 1)
        k = tl.arange(0, WIDTH)
        w = tiles + e.to(tl.int64) * (N * T * 64)
        w = w + ((safe_n // 64) * (T * 4096) + safe_n % 64 * 64)[:, None] + k[None, :]
        s = scales + e.to(tl.int64) * (T * (128 // GROUP) * N) + safe_n
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for t in range(T):
            for part in tl.static_range(64 // WIDTH):
                low, high = decode(tl.load(w + t * 4096 + part * WIDTH))
                column = t * 128 + part * WIDTH + k
                x_low = tl.load(x + rows[None, :] + column[:, None], mask=(column < K)[:, None], other=0.0)
                x_high = tl.load(x + rows[None, :] + column[:, None] + 64, mask=(column + 64 < K)[:, None], other=0.0)
                if GROUP == 128:
                    scale = tl.load(s + t * N).to(tl.float32)
                    acc += tl.dot(high, x_high, tl.dot(low, x_low)) * scale[:, None]
                else:
                    group = t * (128 // GROUP) + part
                    acc += tl.dot(low, x_low) * tl.load(s + group * N).to(tl.float32)[:, None]
                    group += 64 // WIDTH
                    acc += tl.dot(high, x_high) * tl.load(s + group * N).to(tl.float32)[:, None]
        if PER_TOKEN:
            acc = acc * (tl.load(a_scale + m, mask=m < last, other=0.0) * 256.0)[None, :]
        else:
            acc = acc * (tl.load(a_scale) * 256.0)
        where = out + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(where, acc.to(tl.bfloat16), mask=(m < last)[None, :] & (n < N)[:, None])
