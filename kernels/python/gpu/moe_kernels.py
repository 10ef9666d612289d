"""What surrounds the two products of a mixture of experts: sort and quantize, activate and requantize, add up.

Rows are sorted by expert; a pair is a token and one of its experts, its position the row that it gets, or -1 where the
expert is not here. `amax` holds a running maximum.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def scale_of(amax):
    """Scale that puts `amax` at the largest FP8 number; 1 where there is nothing to scale."""
    return tl.where(amax > 0, tl.div_rn(amax, FP8_MAX), 1.0)


@triton.jit
def to_fp8(values, scale):
    """Over the scale, saturated, to the nearest FP8 number."""
    scaled = tl.div_rn(values, tl.zeros_like(values) + scale)
    return tl.clamp(scaled, -FP8_MAX, FP8_MAX).to(tl.float8e4nv)


@triton.jit
def count(
    ids,
    x,
    counts,
    ranks,
    amax,
    experts,
    k,
    H: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TENSOR: tl.constexpr,
):
    """Program t: count the pairs of each expert and number them; with `TENSOR`, the largest magnitude of x too."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K)
    expert = tl.load(ids + t * k + j, mask=j < k, other=-1)
    here = (expert >= 0) & (expert < experts)
    rank = tl.atomic_add(counts + expert, 1, mask=here, sem="relaxed")
    tl.store(ranks + t * k + j, rank, mask=j < k)
    if TENSOR and tl.sum(here.to(tl.int32), 0) > 0:
        h = tl.arange(0, WIDTH)
        row = tl.load(x + t * H + h, mask=h < H, other=0.0).to(tl.float32)
        tl.atomic_max(amax, tl.max(tl.abs(row), 0), sem="relaxed")


@triton.jit
def sort_and_quantize(
    ids,
    x,
    counts,
    ranks,
    amax,
    offsets,
    positions,
    rows,
    scales,
    experts,
    k,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
):
    """Program t: positions of token t's pairs, and its row in FP8 at each of them; program 0 writes `offsets`."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    j = tl.arange(0, K)
    size = tl.load(counts + e, mask=e < experts, other=0)
    if t == 0:
        tl.store(offsets + 1 + e, tl.cumsum(size, 0), mask=e < experts)
        tl.store(offsets, 0)
    expert = tl.load(ids + t * k + j, mask=j < k, other=-1)
    here = (expert >= 0) & (expert < experts)
    before = tl.sum(tl.where(e[None, :] < expert[:, None], size[None, :], 0), 1)
    position = tl.where(here, before + tl.load(ranks + t * k + j, mask=j < k, other=0), -1)
    tl.store(positions + t * k + j, position, mask=j < k)
    h = tl.arange(0, WIDTH)
    row = tl.load(x + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    if MODE == "static":
        scale = tl.load(scales)
    elif MODE == "tensor":
        scale = scale_of(tl.load(amax))
        if t == 0:
            tl.store(scales, scale)
    else:
        scale = scale_of(tl.max(tl.abs(row), 0))
        tl.store(scales + position, tl.zeros_like(position).to(tl.float32) + scale, mask=here)
    quantized = to_fp8(row, scale)
    for i in range(k):
        at = tl.sum(tl.where(j == i, position, 0), 0).to(tl.int64)
        if at >= 0:
            tl.store(rows + at * H + h, quantized, mask=h < H)


@triton.jit
def activated(hidden, r, I: tl.constexpr, WIDTH: tl.constexpr):
    """silu(gate) * up of row r, in fp32."""
    i = tl.arange(0, WIDTH)
    gate = tl.load(hidden + r * (2 * I) + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(hidden + r * (2 * I) + I + i, mask=i < I, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def largest_activated(hidden, offsets, amax, experts, I: tl.constexpr, WIDTH: tl.constexpr):
    """Program r: the largest magnitude of row r after the activation, into `amax`."""
    r = tl.program_id(0).to(tl.int64)
    if r < tl.load(offsets + experts):
        tl.atomic_max(amax, tl.max(tl.abs(activated(hidden, r, I, WIDTH)), 0), sem="relaxed")


@triton.jit
def activate_and_quantize(
    hidden,
    offsets,
    amax,
    scales,
    rows,
    experts,
    I: tl.constexpr,
    WIDTH: tl.constexpr,
    MODE: tl.constexpr,
):
    """Program r: silu(gate) * up of row r in FP8."""
    r = tl.program_id(0).to(tl.int64)
    if r < tl.load(offsets + experts):
        values = activated(hidden, r, I, WIDTH)
        if MODE == "static":
            scale = tl.load(scales)
        elif MODE == "tensor":
            scale = scale_of(tl.load(amax))
            if r == 0:
                tl.store(scales, scale)
        else:
            scale = scale_of(tl.max(tl.abs(values), 0))
            tl.store(scales + r, scale)
        i = tl.arange(0, WIDTH)
        tl.store(rows + r * I + i, to_fp8(values, scale), mask=i < I)


@triton.jit
def add_up(rows, positions, weights, out, k, H: tl.constexpr, WIDTH: tl.constexpr):
    """Program (t, b): block b of out[t] = sum_j weights[t, j] * rows[positions[t, j]], in fp32, ascending j."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    acc = tl.zeros((WIDTH,), tl.float32)
    for j in range(k):
        at = tl.load(positions + t * k + j).to(tl.int64)
        if at >= 0:
            row = tl.load(rows + at * H + h, mask=h < H, other=0.0).to(tl.float32)
            acc += tl.load(weights + t * k + j) * row
    tl.store(out + t * H + h, acc.to(tl.bfloat16), mask=h < H)
