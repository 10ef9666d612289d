"""The grouped product for Hopper, in Triton's Gluon dialect.

Persistent programs: a producer warp copies weight tiles and activation rows into a ring of stages, two consumer
warpgroups decode int4 to FP8 in registers, multiply on the tensor cores and scale each group of 128 columns in fp32.

A consumer has one or two blocks of 64 weight rows of each tile of work. The height of a tile is the smallest one in
`next_height` that holds the activation rows that are left, decided on the device: there is no tile list to build. It
is made of pieces, each of which one product takes; a block of weights is decoded once for all of them. Blocks beyond N
are read twice and stored once.

Register operands of `warpgroup_mma` are read asynchronously. The assembler keeps them alive until the wait; where it
cannot prove that nothing else writes them, it serializes the products and says so. `tests/kernels/gpu/test_sass.py`
checks both in the machine code.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .gluon_problem import Problem, Ring
from .gluon_schedule import Schedule
from .gluon_shapes import (
    count_pieces,
    groups_between_stops,
    next_height,
    pad,
    product_layout,
    registers_for,
    rows_before,
    rows_of,
)

CONSUMERS = gl.constexpr(2)


@gluon.jit
def decode(tiles):
    """Bytes of the layout's tiles to e4m3 numbers v * 2**-8, low and high columns: seven operations, eight weights."""
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 sign, rest;
        and.b32 sign, $2, 0x80808080; and.b32 rest, $2, 0x8E8E8E8E; shr.u32 sign, sign, 6; add.u32 $0, rest, sign;
        and.b32 sign, $2, 0x01010101; shr.u32 rest, $2, 3; and.b32 rest, rest, 0x0E0E0E0E;
        mad.lo.u32 $1, sign, 0x82, rest;
        }""",
        "=&r,=&r,r",
        [tiles],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    return low.to(gl.float8e4nv, bitcast=True), high.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def prefetch_scales(p, w_row, last_block, g):
    """Have the second-level cache fetch the scales of a tile's 64-row blocks for as many groups as 32 lines cover.

    Consumers load them one group ahead, which hides that cache's latency but not the memory's.
    """
    TILES: gl.constexpr = CONSUMERS * p.blocks
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    group = gl.minimum(g + lane // TILES, p.groups - 1)
    block = w_row // (p.groups * 64) + gl.minimum(lane % TILES, last_block)  # counted over the experts
    row = (block // (p.n // 64) * p.groups + group) * p.n + block % (p.n // 64) * 64
    prefetch: gl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(prefetch, "=r,l", [(p.scales + row).to(gl.int64)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def produce_tile(p, ring, x16, x64, w, turn, w_row, x_row, last_block, HEIGHT: gl.constexpr):
    """Fill the stages of one tile: its weight tiles and `HEIGHT` activation rows each."""
    TILES: gl.constexpr = CONSUMERS * p.blocks
    for g in range(p.groups):
        if g % (32 // TILES) == 0:
            prefetch_scales(p, w_row, last_block, g)
        stage = turn % ring.stages
        bar = ring.full.index(stage)
        mbarrier.wait(ring.empty.index(stage), ((turn // ring.stages) & 1) ^ 1)
        mbarrier.expect(bar, TILES * 64 * 64 + HEIGHT * 128)
        for i in gl.static_range(TILES):
            block = i
            if p.n % (64 * TILES) != 0:
                block = gl.minimum(i, last_block)
            row = w_row + block * (p.groups * 64) + g * 64
            tma.async_copy_global_to_shared(w, [row, 0], bar, ring.ws.index(stage * TILES + i))
        x = ring.xs.index(stage)
        for i in gl.static_range(HEIGHT // 64):
            tma.async_copy_global_to_shared(x64, [x_row + i * 64, g * 128], bar, x.slice(i * 64, 64))
        for i in gl.static_range(HEIGHT // 64 * 4, HEIGHT // 16):
            tma.async_copy_global_to_shared(x16, [x_row + i * 16, g * 128], bar, x.slice(i * 16, 16))
        turn += 1


@gluon.jit
def produce_height(p, ring, x16, x64, w, turn, w_row, x_row, last_block, rows, HEIGHT: gl.constexpr):
    """`produce_tile` of the smallest height from `HEIGHT` on that holds the rows that are left."""
    if p.tile_m == HEIGHT or rows <= HEIGHT:
        produce_tile(p, ring, x16, x64, w, turn, w_row, x_row, last_block, HEIGHT)
    else:
        produce_height(p, ring, x16, x64, w, turn, w_row, x_row, last_block, rows, next_height(HEIGHT))


@gluon.jit
def produce(p, schedule, ring, x16, x64, w):
    """The producer warp: every stage of every tile of this program, in the order in which the consumers take them."""
    TILES: gl.constexpr = CONSUMERS * p.blocks
    turn = 0
    cursor = schedule.first()
    while cursor.expert < schedule.experts:
        block, row = cursor.place(schedule)
        w_row = (cursor.expert * (p.n // 64) + block * TILES) * (p.groups * 64)
        last_block = p.n // 64 - 1 - block * TILES
        produce_height(p, ring, x16, x64, w, turn, w_row, row, last_block, cursor.last - row, 16)
        turn += p.groups
        cursor = cursor.next(schedule)


@gluon.jit
def wait_for_stage(ring, turn):
    """Wait until the producer has filled the stage of this turn."""
    mbarrier.wait(ring.full.index(turn % ring.stages), (turn // ring.stages) & 1)


@gluon.jit
def fragment(p, ring, turn, BLOCK: gl.constexpr, OPERAND: gl.constexpr):
    """FP8 operands of 64 weight rows by 128 columns, in registers."""
    return decode(ring.ws.index(turn % ring.stages * (CONSUMERS * p.blocks) + BLOCK).load(OPERAND))


@gluon.jit
def zeros(ROWS: gl.constexpr):
    """An empty sum of 64 weight rows by `ROWS` activation rows."""
    return gl.zeros([64, ROWS], gl.float32, product_layout(ROWS))


@gluon.jit
def multiply(p, low, high, ring, turn, INDEX: gl.constexpr, HEIGHT: gl.constexpr):
    """Start the product of 64 weight rows and a piece of the stage's activation rows; not finished on return."""
    ROWS: gl.constexpr = rows_of(HEIGHT, p.piece, INDEX)
    MMA: gl.constexpr = product_layout(ROWS)
    low = gl.convert_layout(low, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
    high = gl.convert_layout(high, gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
    x = ring.xs.index(turn % ring.stages).slice(rows_before(HEIGHT, p.piece, INDEX), ROWS)
    part = warpgroup_mma(low, x.slice(0, 64, dim=1).permute((1, 0)), zeros(ROWS), use_acc=False, is_async=True)
    return warpgroup_mma(high, x.slice(64, 64, dim=1).permute((1, 0)), part, is_async=True)


@gluon.jit
def row_scales(p, row, last, HEIGHT: gl.constexpr):
    """Scales of a piece's activation rows, times 256."""
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(0, product_layout(HEIGHT)))
    if p.per_token:
        scales = gl.load(p.a_scale + m, mask=m < last, other=0.0)
    else:
        scales = gl.load(p.a_scale + m * 0)
    return scales * 256.0


@gluon.jit
def store(p, total, x_scales, buffer, row, last, n0):
    """Scale by the activations, round to bf16, turn through shared memory, store the rows that exist."""
    HEIGHT: gl.constexpr = total.shape[1]
    part = buffer.slice(0, HEIGHT)
    part.permute((1, 0)).store((total * x_scales[None, :]).to(gl.bfloat16))
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = part.load(ROWS)
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, ROWS))
    n = n0 + gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    gl.store(p.out + m[:, None].to(gl.int64) * p.n + n[None, :], values, mask=(m < last)[:, None])


@gluon.jit
def finish(product, sums, LAST: gl.constexpr, BEHIND: gl.constexpr):
    """Wait for a product with `BEHIND` others behind it, once the sum that was added to last is complete.

    Without that order the compiler puts additions off, and finished products fill the registers.
    """
    done, last = warpgroup_mma_wait(2 * BEHIND, [product, sums[LAST]])  # a product is two groups of instructions
    return done, sums[:LAST] + (last,) + sums[LAST + 1 :]


@gluon.jit
def settle(sums, LAST: gl.constexpr):
    """Have the additions to a sum done before what follows."""
    last = warpgroup_mma_wait(2, [sums[LAST]])
    return sums[:LAST] + (last,) + sums[LAST + 1 :]


@gluon.jit
def add_scaled(sums, product, scales, shift, INDEX: gl.constexpr):
    """The sums with a finished product, each of its weight rows scaled, added to one of them.

    A scale is half of a word of `scales`: 16-bit numbers that cross a loop's back edge are packed, and so waited for.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(1, product.type.layout)
    scale = ((scales << shift) & -65536).to(gl.float32, bitcast=True)
    scale = gl.convert_layout(scale, COLUMN, assert_trivial=True)
    return sums[:INDEX] + (sums[INDEX] + product * scale[:, None],) + sums[INDEX + 1 :]


@gluon.jit
def empty_sums(p, HEIGHT: gl.constexpr):
    """A sum for each block and piece, block by block."""
    PIECES: gl.constexpr = count_pieces(HEIGHT, p.piece)
    sums = ()
    for i in gl.static_range(p.blocks * PIECES):
        sums = sums + (zeros(rows_of(HEIGHT, p.piece, i % PIECES)),)  # type: ignore[assignment]
    return sums


@gluon.jit
def store_tile(p, sums, x_scales, buffer, row, last, n0, HEIGHT: gl.constexpr):
    """Store what a consumer has of a tile; `x_scales` are its rows' scales where they are loaded already."""
    PIECES: gl.constexpr = count_pieces(HEIGHT, p.piece)
    for i in gl.static_range(PIECES):
        at = row + rows_before(HEIGHT, p.piece, i)
        if HEIGHT > 32:
            x_scales = row_scales(p, at, last, rows_of(HEIGHT, p.piece, i))
        if n0 < p.n:
            store(p, sums[i], x_scales, buffer, at, last, n0)
        if p.blocks == 2 and n0 + 64 < p.n:
            store(p, sums[PIECES * (p.blocks - 1) + i], x_scales, buffer, at, last, n0 + 64)


@gluon.jit
def consume_tile(p, ring, buffer, turn, expert, block, row, last, C: gl.constexpr, HEIGHT: gl.constexpr):
    """A consumer's weight rows of a tile: for each group and block, one product for each piece of activation rows.

    A block is decoded once for all pieces. A product starts before the one before it is waited for, and the next
    block is decoded meanwhile, so that neither decoding nor scaling keeps the tensor cores waiting. Only operands, no
    product in flight, cross the loop's back edge: the assembler would answer by serializing all products.
    """
    PIECES: gl.constexpr = count_pieces(HEIGHT, p.piece)
    SUMS: gl.constexpr = p.blocks * PIECES
    UNROLL: gl.constexpr = groups_between_stops(p.groups, SUMS, p.products)
    STEPS: gl.constexpr = UNROLL * SUMS
    ALONE: gl.constexpr = registers_for(p.blocks, HEIGHT, p.piece, 1) > 224
    CROWDED: gl.constexpr = registers_for(p.blocks, HEIGHT, p.piece, 2) > 208
    MMA: gl.constexpr = product_layout(rows_of(HEIGHT, p.piece, 0))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    n0 = (block * CONSUMERS + C) * (64 * p.blocks)
    n = gl.minimum(n0, p.n - 64) + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    scales0 = p.scales.to(gl.pointer_type(gl.int32), bitcast=True) + expert * (p.groups * p.n // 2) + n // 2
    scales1 = scales0 + (32 if p.n % 128 == 0 else (gl.minimum(n0 + 64, p.n - 64) - gl.minimum(n0, p.n - 64)) // 2)
    shift = (1 - n % 2) * 16
    sums = empty_sums(p, HEIGHT)
    if HEIGHT <= 32:  # there are registers for them, and a small tile would wait for the load at its end
        x_scales = row_scales(p, row, last, HEIGHT)
    else:
        x_scales = None
    s0 = gl.load(scales0)
    s1 = gl.load(scales1)
    next0 = gl.load(scales0 + min(1, p.groups - 1) * (p.n // 2))
    next1 = gl.load(scales1 + min(1, p.groups - 1) * (p.n // 2))
    for g in range(0, p.groups, UNROLL):
        wait_for_stage(ring, turn)
        low, high = fragment(p, ring, turn, C * p.blocks, OPERAND)
        product = multiply(p, low, high, ring, turn, 0, HEIGHT)
        for i in gl.static_range(STEPS):
            if i % SUMS == 0:
                ahead = gl.minimum(g + i // SUMS + 2, p.groups - 1) * (p.n // 2)
                later0 = gl.load(scales0 + ahead)
                later1 = gl.load(scales1 + ahead)
            following = turn + (i + 1) // SUMS
            if i + 1 < STEPS:
                if (i + 1) % SUMS == 0:
                    wait_for_stage(ring, following)
                if (i + 1) % PIECES == 0:
                    low, high = fragment(p, ring, following, C * p.blocks + (i + 1) // PIECES % p.blocks, OPERAND)
            if i + 1 == STEPS or ALONE or (CROWDED and (i + 1) % PIECES == 0):
                done, sums = finish(product, sums, (i - 1) % SUMS, 0)
            else:
                after = multiply(p, low, high, ring, following, (i + 1) % PIECES, HEIGHT)
                done, sums = finish(product, sums, (i - 1) % SUMS, 1)
                product = after
            if i + 1 < STEPS and not ALONE and CROWDED and (i + 1) % PIECES == 0:
                product = multiply(p, low, high, ring, following, (i + 1) % PIECES, HEIGHT)
            if (i + 1) % SUMS == 0:
                mbarrier.arrive(ring.empty.index((turn + i // SUMS) % ring.stages), count=1)
            sums = add_scaled(sums, done, s0 if i // PIECES % p.blocks == 0 else s1, shift, i % SUMS)
            if i + 1 < STEPS and ALONE:
                sums = settle(sums, i % SUMS)
                product = multiply(p, low, high, ring, following, (i + 1) % PIECES, HEIGHT)
            if (i + 1) % SUMS == 0:
                s0 = next0
                s1 = next1
                next0 = later0
                next1 = later1
        turn += UNROLL
    store_tile(p, sums, x_scales, buffer, row, last, n0, HEIGHT)


@gluon.jit
def consume_height(p, ring, buffer, turn, cursor, block, row, C: gl.constexpr, HEIGHT: gl.constexpr):
    """`consume_tile` of the smallest height from `HEIGHT` on that holds the rows that are left."""
    if p.tile_m == HEIGHT or cursor.last - row <= HEIGHT:
        consume_tile(p, ring, buffer, turn, cursor.expert, block, row, cursor.last, C, HEIGHT)
    else:
        consume_height(p, ring, buffer, turn, cursor, block, row, C, next_height(HEIGHT))


@gluon.jit
def consume(p, schedule, ring, buffers, C: gl.constexpr):
    """Consumer warpgroup `C`: its weight rows of every tile of this program."""
    turn = 0
    cursor = schedule.first()
    while cursor.expert < schedule.experts:
        block, row = cursor.place(schedule)
        consume_height(p, ring, buffers.index(C), turn, cursor, block, row, C, 16)
        turn += p.groups
        cursor = cursor.next(schedule)


@gluon.jit(do_not_specialize=["a_scale", "offsets", "experts"])
def w4a8_grouped(
    x16,
    x64,
    w,
    scales,
    a_scale,
    out,
    offsets,
    experts,
    N: gl.constexpr,
    GROUPS: gl.constexpr,
    PER_TOKEN: gl.constexpr,
    BLOCKS: gl.constexpr,
    TILE_M: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCTS: gl.constexpr,
    PIECE: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Out[m, n] = a_scale[m] * sum_g scales[e, g, n] * sum_k x[m, k] * w[e, n, k] for the rows m of every expert e.

    Descriptors are those of `gluon_launch`. `REGISTERS` are a consumer thread's; the producer has 24.
    """
    TILES: gl.constexpr = CONSUMERS * BLOCKS
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, pad(TILE_M), 128], x16.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES * TILES, 64, 64], w.layout)
    buffers = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, min(TILE_M, PIECE), 64], gl.NVMMASharedLayout(128, 16, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    ring = Ring(xs, ws, full, empty, STAGES)
    p = Problem(scales, a_scale, out, N, GROUPS, PER_TOKEN, BLOCKS, TILE_M, PRODUCTS, PIECE)
    schedule = Schedule(offsets, experts, (N + 64 * TILES - 1) // (64 * TILES), TILE_M)
    gl.warp_specialize(
        [
            (consume, (p, schedule, ring, buffers, 0)),
            (consume, (p, schedule, ring, buffers, 1)),
            (produce, (p, schedule, ring, x16, x64, w)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
