"""The grouped product for Hopper, in Triton's Gluon dialect.

Persistent programs: a producer warp copies weight tiles and activation rows into a ring of stages, two consumer
warpgroups decode int4 to FP8 in registers, multiply on the tensor cores and scale each group of 128 columns in fp32.

A consumer has one or two blocks of 64 weight rows of each tile of work. The height of a tile is the smallest of 16, 32,
64 and 128 that holds the activation rows that are left, decided on the device: there is no tile list to build, and few
rows cost no more than the weight that they read. Blocks beyond N are read twice and stored once.

Register operands of `warpgroup_mma` are read asynchronously. The assembler keeps them alive until the wait; where it
cannot prove that nothing else writes them, it serializes the products and says so. `tests/kernels/gpu/test_sass.py`
checks both in the machine code.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# Annotations of aggregates are read when the kernel is built, so they cannot be strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from .gluon_schedule import Schedule

CONSUMERS = gl.constexpr(2)


@aggregate
class Ring:
    """Stages of activation rows and weight tiles, 128 columns deep, with their barriers."""

    xs: gl.shared_memory_descriptor
    ws: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, xs, ws, full, empty, stages):
        self.xs = xs
        self.ws = ws
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)


@aggregate
class Problem:
    """Operands, and sizes known when the kernel is compiled; `groups` covers K in groups of 128.

    A consumer has `blocks` blocks of 64 weight rows of a tile.
    """

    scales: gl.tensor
    a_scale: gl.tensor
    out: gl.tensor
    n: gl.constexpr
    groups: gl.constexpr
    per_token: gl.constexpr
    blocks: gl.constexpr
    tile_m: gl.constexpr
    unroll: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scales, a_scale, out, n, groups, per_token, blocks, tile_m, unroll):
        self.scales = scales
        self.a_scale = a_scale
        self.out = out
        self.n = gl.constexpr(n)
        self.groups = gl.constexpr(groups)
        self.per_token = gl.constexpr(per_token)
        self.blocks = gl.constexpr(blocks)
        self.tile_m = gl.constexpr(tile_m)
        self.unroll = gl.constexpr(unroll)


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
def produce_tile(p, ring, x16, x32, w, turn, w_row, x_row, last_block, HEIGHT: gl.constexpr):
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
        if HEIGHT == 16:
            tma.async_copy_global_to_shared(x16, [x_row, g * 128], bar, ring.xs.index(stage).slice(0, 16))
        else:
            for i in gl.static_range(HEIGHT // 32):
                part = ring.xs.index(stage).slice(i * 32, 32)
                tma.async_copy_global_to_shared(x32, [x_row + i * 32, g * 128], bar, part)
        turn += 1


@gluon.jit
def produce_height(p, ring, x16, x32, w, turn, w_row, x_row, last_block, rows, HEIGHT: gl.constexpr):
    """`produce_tile` of the smallest height from `HEIGHT` on that holds the rows that are left."""
    if p.tile_m == HEIGHT or rows <= HEIGHT:
        produce_tile(p, ring, x16, x32, w, turn, w_row, x_row, last_block, HEIGHT)
    else:
        produce_height(p, ring, x16, x32, w, turn, w_row, x_row, last_block, rows, 2 * HEIGHT)


@gluon.jit
def produce(p, schedule, ring, x16, x32, w):
    """The producer warp: every stage of every tile of this program, in the order in which the consumers take them."""
    TILES: gl.constexpr = CONSUMERS * p.blocks
    turn = 0
    cursor = schedule.first()
    while cursor.expert < schedule.experts:
        block, row = cursor.place(schedule)
        w_row = (cursor.expert * (p.n // 64) + block * TILES) * (p.groups * 64)
        last_block = p.n // 64 - 1 - block * TILES
        produce_height(p, ring, x16, x32, w, turn, w_row, row, last_block, cursor.last - row, 16)
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
def multiply(low, high, ring, turn, zero, HEIGHT: gl.constexpr):
    """Start the product of 64 weight rows and the stage's activation rows, 128 columns deep; not finished on return."""
    x = ring.xs.index(turn % ring.stages).slice(0, HEIGHT)
    part = warpgroup_mma(low, x.slice(0, 64, dim=1).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(high, x.slice(64, 64, dim=1).permute((1, 0)), part, is_async=True)


@gluon.jit
def store(p, acc, buffer, row, last, n0, HEIGHT: gl.constexpr, MMA: gl.constexpr):
    """Scale by the activations, round to bf16, turn through shared memory, store the rows that exist."""
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(0, MMA))
    if p.per_token:
        acc = acc * (gl.load(p.a_scale + m, mask=m < last, other=0.0) * 256.0)[None, :]
    else:
        acc = acc * (gl.load(p.a_scale) * 256.0)
    part = buffer.slice(0, HEIGHT)
    part.permute((1, 0)).store(acc.to(gl.bfloat16))
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = part.load(ROWS)
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, ROWS))
    n = n0 + gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    gl.store(p.out + m[:, None].to(gl.int64) * p.n + n[None, :], values, mask=(m < last)[:, None])


@gluon.jit
def consume_tile(p, ring, buffer, turn, expert, block, row, last, C: gl.constexpr, HEIGHT: gl.constexpr):
    """A consumer's weight rows of a tile: one product per block and group, decoding one while another multiplies.

    Within `unroll` groups the tensor cores do not wait for a decode. No product is in flight across the loop's back
    edge, which the assembler would answer by serializing all of them. Accumulators of `tile_m` rows and operands fill
    the registers, and there is nothing to decode ahead into; at 128 rows not even room for two products.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    UNROLL: gl.constexpr = 1 if p.tile_m == HEIGHT else p.unroll
    n0 = (block * CONSUMERS + C) * (64 * p.blocks)
    n = gl.minimum(n0, p.n - 64) + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    scales0 = p.scales + expert * (p.groups * p.n) + n
    scales1 = scales0 + (64 if p.n % 128 == 0 else gl.minimum(n0 + 64, p.n - 64) - gl.minimum(n0, p.n - 64))
    acc0 = gl.zeros([64, HEIGHT], gl.float32, MMA)
    acc1 = gl.zeros([64, HEIGHT], gl.float32, MMA)
    zero = gl.zeros([64, HEIGHT], gl.float32, MMA)
    s0 = gl.load(scales0)
    s1 = gl.load(scales1)
    for g in range(0, p.groups, UNROLL):
        wait_for_stage(ring, turn)
        low, high = fragment(p, ring, turn, C * p.blocks, OPERAND)
        product = multiply(low, high, ring, turn, zero, HEIGHT)
        for u in gl.static_range(UNROLL):
            ahead = gl.minimum(g + u + 1, p.groups - 1) * p.n
            next0 = gl.load(scales0 + ahead)
            next1 = gl.load(scales1 + ahead)
            for b in gl.static_range(p.blocks):
                following = turn + (b + 1) // p.blocks
                if u * p.blocks + b + 1 < UNROLL * p.blocks:
                    if b + 1 == p.blocks:
                        wait_for_stage(ring, following)
                    low, high = fragment(p, ring, following, C * p.blocks + (b + 1) % p.blocks, OPERAND)
                done = warpgroup_mma_wait(0, [product])
                if b + 1 == p.blocks:
                    mbarrier.arrive(ring.empty.index(turn % ring.stages), count=1)
                if u * p.blocks + b + 1 < UNROLL * p.blocks and HEIGHT < 128:
                    product = multiply(low, high, ring, following, zero, HEIGHT)
                if b == 0:
                    acc0 = acc0 + done * s0.to(gl.float32)[:, None]
                else:
                    acc1 = acc1 + done * s1.to(gl.float32)[:, None]
                if u * p.blocks + b + 1 < UNROLL * p.blocks and HEIGHT == 128:
                    product = multiply(low, high, ring, following, zero, HEIGHT)
                turn = following
            s0 = next0
            s1 = next1
    if n0 < p.n:
        store(p, acc0, buffer, row, last, n0, HEIGHT, MMA)
    if p.blocks == 2 and n0 + 64 < p.n:
        store(p, acc1, buffer, row, last, n0 + 64, HEIGHT, MMA)


@gluon.jit
def consume_height(p, ring, buffer, turn, cursor, block, row, C: gl.constexpr, HEIGHT: gl.constexpr):
    """`consume_tile` of the smallest height from `HEIGHT` on that holds the rows that are left."""
    if p.tile_m == HEIGHT or cursor.last - row <= HEIGHT:
        consume_tile(p, ring, buffer, turn, cursor.expert, block, row, cursor.last, C, HEIGHT)
    else:
        consume_height(p, ring, buffer, turn, cursor, block, row, C, 2 * HEIGHT)


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
    x32,
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
    UNROLL: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Out[m, n] = a_scale[m] * sum_g scales[e, g, n] * sum_k x[m, k] * w[e, n, k] for the rows m of every expert e.

    Descriptors are those of `gluon_launch`. `REGISTERS` are a consumer thread's; the producer has 24.
    """
    TILES: gl.constexpr = CONSUMERS * BLOCKS
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE_M, 128], x16.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES * TILES, 64, 64], w.layout)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, TILE_M, 64], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    ring = Ring(xs, ws, full, empty, STAGES)
    p = Problem(scales, a_scale, out, N, GROUPS, PER_TOKEN, BLOCKS, TILE_M, UNROLL)
    schedule = Schedule(offsets, experts, (N + 64 * TILES - 1) // (64 * TILES), TILE_M)
    gl.warp_specialize(
        [
            (consume, (p, schedule, ring, buffers, 0)),
            (consume, (p, schedule, ring, buffers, 1)),
            (produce, (p, schedule, ring, x16, x32, w)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
