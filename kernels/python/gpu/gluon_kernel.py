"""The grouped product for Hopper, in Triton's Gluon dialect.

One persistent program per multiprocessor: a producer warp copies weight tiles and activation rows into a ring of
stages, two consumer warpgroups decode int4 to FP8 in registers, multiply on the tensor cores and scale each group of
128 columns in fp32.

A tile of work is one expert, 256 rows of the weight (128 per consumer) and up to 128 activation rows. Its height is the
smallest of 16, 32, 64 and 128 that holds the rows that are left, decided on the device: there is no tile list to build,
and few rows cost no more than the weight that they read. Blocks of 64 weight rows beyond N are read twice, stored once.

Register operands of `warpgroup_mma` are read asynchronously. The assembler keeps them alive until the wait; where it
cannot prove that nothing else writes them, it serializes the products and says so. `tests/kernels/gpu/test_sass.py`
checks both in the machine code.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# Annotations of aggregates are read when the kernel is built, so they cannot be strings.

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

TILE_M = gl.constexpr(128)
TILE_N = gl.constexpr(256)


@aggregate
class Ring:
    """Stages of 128 activation rows and four weight tiles, 128 columns deep, with their barriers."""

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
    """Operands, and sizes known when the kernel is compiled; `groups` covers K in groups of 128."""

    scales: gl.tensor
    a_scale: gl.tensor
    out: gl.tensor
    offsets: gl.tensor
    experts: gl.tensor
    n: gl.constexpr
    groups: gl.constexpr
    per_token: gl.constexpr
    unroll: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scales, a_scale, out, offsets, experts, n, groups, per_token, unroll):
        self.scales = scales
        self.a_scale = a_scale
        self.out = out
        self.offsets = offsets
        self.experts = experts
        self.n = gl.constexpr(n)
        self.groups = gl.constexpr(groups)
        self.per_token = gl.constexpr(per_token)
        self.unroll = gl.constexpr(unroll)


@aggregate
class Cursor:
    """Where a program stands: tile `tile` is one of the `tiles` of `expert`, which come after `base` others.

    The expert's activation rows are `first` .. `last` - 1; it equals the number of experts where no tile is left.
    """

    tile: gl.tensor
    expert: gl.tensor
    base: gl.tensor
    tiles: gl.tensor
    first: gl.tensor
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile, expert, base, tiles, first, last):
        self.tile = tile
        self.expert = expert
        self.base = base
        self.tiles = tiles
        self.first = first
        self.last = last

    @gluon.jit
    def seek(self, p):
        """Walk from expert to expert until the tile is reached."""
        expert = self.expert
        base = self.base
        tiles = self.tiles
        first = self.first
        last = self.last
        while (self.tile >= base + tiles) & (expert < p.experts):
            base += tiles
            expert += 1
            first = last
            last = gl.load(p.offsets + gl.minimum(expert + 1, p.experts))
            tiles = gl.cdiv(last - first, TILE_M) * gl.cdiv(p.n, TILE_N)
        return Cursor(self.tile, expert, base, tiles, first, last)

    @gluon.jit
    def next(self, p):
        """The cursor of this program's next tile."""
        tile = self.tile + gl.num_programs(0)
        return Cursor(tile, self.expert, self.base, self.tiles, self.first, self.last).seek(p)

    @gluon.jit
    def place(self):
        """Block of 256 weight rows, and first activation row; tiles that share weights are neighbours."""
        heights = gl.cdiv(self.last - self.first, TILE_M)
        block = (self.tile - self.base) // heights
        return block, self.first + (self.tile - self.base - block * heights) * TILE_M


@gluon.jit
def first_tile(p):
    """The cursor of this program's first tile."""
    zero = gl.to_tensor(0)
    return Cursor(gl.program_id(0), zero - 1, zero, zero, zero, gl.load(p.offsets)).seek(p)


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
def produce_tile(p, ring, x16, x32, w, turn, w_row, x_row, last_block, HEIGHT: gl.constexpr):
    """Fill the stages of one tile: four weight tiles and `HEIGHT` activation rows each."""
    for g in range(p.groups):
        stage = turn % ring.stages
        bar = ring.full.index(stage)
        mbarrier.wait(ring.empty.index(stage), ((turn // ring.stages) & 1) ^ 1)
        mbarrier.expect(bar, 4 * 64 * 64 + HEIGHT * 128)
        for i in gl.static_range(4):
            block = i
            if p.n % TILE_N != 0:
                block = gl.minimum(i, last_block)
            row = w_row + block * (p.groups * 64) + g * 64
            tma.async_copy_global_to_shared(w, [row, 0], bar, ring.ws.index(stage * 4 + i))
        if HEIGHT == 16:
            tma.async_copy_global_to_shared(x16, [x_row, g * 128], bar, ring.xs.index(stage).slice(0, 16))
        else:
            for i in gl.static_range(HEIGHT // 32):
                rows = ring.xs.index(stage).slice(i * 32, 32)
                tma.async_copy_global_to_shared(x32, [x_row + i * 32, g * 128], bar, rows)
        turn += 1


@gluon.jit
def produce(p, ring, x16, x32, w):
    """The producer warp: every stage of every tile of this program, in the order in which the consumers take them."""
    turn = 0
    cursor = first_tile(p)
    while cursor.expert < p.experts:
        block, row = cursor.place()
        w_row = (cursor.expert * (p.n // 64) + block * 4) * (p.groups * 64)
        last_block = p.n // 64 - 1 - block * 4
        rows = cursor.last - row
        if rows <= 16:
            produce_tile(p, ring, x16, x32, w, turn, w_row, row, last_block, 16)
        elif rows <= 32:
            produce_tile(p, ring, x16, x32, w, turn, w_row, row, last_block, 32)
        elif rows <= 64:
            produce_tile(p, ring, x16, x32, w, turn, w_row, row, last_block, 64)
        else:
            produce_tile(p, ring, x16, x32, w, turn, w_row, row, last_block, 128)
        turn += p.groups
        cursor = cursor.next(p)


@gluon.jit
def wait_for_stage(ring, turn):
    """Wait until the producer has filled the stage of this turn."""
    mbarrier.wait(ring.full.index(turn % ring.stages), (turn // ring.stages) & 1)


@gluon.jit
def fragment(ring, turn, BLOCK: gl.constexpr, OPERAND: gl.constexpr):
    """FP8 operands of 64 weight rows by 128 columns, in registers."""
    return decode(ring.ws.index(turn % ring.stages * 4 + BLOCK).load(OPERAND))


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
    """128 weight rows of a tile: two products of 64 rows per group, decoding one while the other multiplies.

    Within `unroll` groups the tensor cores do not wait for a decode. No product is in flight across the loop's back
    edge, which the assembler would answer by serializing all of them. At 128 rows accumulators and operands fill the
    registers, and there is nothing to decode ahead into.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    UNROLL: gl.constexpr = p.unroll if HEIGHT < 128 else 1
    n0 = block * TILE_N + C * 128
    n = gl.minimum(n0, p.n - 64) + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    scales0 = p.scales + expert * (p.groups * p.n) + n
    step: gl.constexpr = 64 if p.n % 128 == 0 else None
    scales1 = scales0 + (gl.minimum(n0 + 64, p.n - 64) - gl.minimum(n0, p.n - 64) if step is None else step)
    acc0 = gl.zeros([64, HEIGHT], gl.float32, MMA)
    acc1 = gl.zeros([64, HEIGHT], gl.float32, MMA)
    zero = gl.zeros([64, HEIGHT], gl.float32, MMA)
    s0 = gl.load(scales0)
    s1 = gl.load(scales1)
    for g in range(0, p.groups, UNROLL):
        wait_for_stage(ring, turn)
        low, high = fragment(ring, turn, C * 2, OPERAND)
        product = multiply(low, high, ring, turn, zero, HEIGHT)
        for u in gl.static_range(UNROLL):
            ahead = gl.minimum(g + u + 1, p.groups - 1) * p.n
            next0 = gl.load(scales0 + ahead)
            next1 = gl.load(scales1 + ahead)
            low, high = fragment(ring, turn, C * 2 + 1, OPERAND)
            done = warpgroup_mma_wait(0, [product])
            acc0 += done * s0.to(gl.float32)[:, None]
            product = multiply(low, high, ring, turn, zero, HEIGHT)
            if u + 1 < UNROLL:
                wait_for_stage(ring, turn + 1)
                low, high = fragment(ring, turn + 1, C * 2, OPERAND)
            done = warpgroup_mma_wait(0, [product])
            mbarrier.arrive(ring.empty.index(turn % ring.stages), count=1)
            acc1 += done * s1.to(gl.float32)[:, None]
            turn += 1
            if u + 1 < UNROLL:
                product = multiply(low, high, ring, turn, zero, HEIGHT)
            s0 = next0
            s1 = next1
    if n0 < p.n:
        store(p, acc0, buffer, row, last, n0, HEIGHT, MMA)
    if n0 + 64 < p.n:
        store(p, acc1, buffer, row, last, n0 + 64, HEIGHT, MMA)


@gluon.jit
def consume(p, ring, buffers, C: gl.constexpr):
    """Consumer warpgroup `C`: rows 128C .. 128C + 127 of every tile of this program."""
    buffer = buffers.index(C)
    turn = 0
    cursor = first_tile(p)
    while cursor.expert < p.experts:
        block, row = cursor.place()
        rows = cursor.last - row
        if rows <= 16:
            consume_tile(p, ring, buffer, turn, cursor.expert, block, row, cursor.last, C, 16)
        elif rows <= 32:
            consume_tile(p, ring, buffer, turn, cursor.expert, block, row, cursor.last, C, 32)
        elif rows <= 64:
            consume_tile(p, ring, buffer, turn, cursor.expert, block, row, cursor.last, C, 64)
        else:
            consume_tile(p, ring, buffer, turn, cursor.expert, block, row, cursor.last, C, 128)
        turn += p.groups
        cursor = cursor.next(p)


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
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Out[m, n] = a_scale[m] * sum_g scales[e, g, n] * sum_k x[m, k] * w[e, n, k] for the rows m of every expert e.

    Descriptors are those of `descriptors`. `REGISTERS` are a consumer thread's; the producer has 24.
    """
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], x16.layout)
    ws = gl.allocate_shared_memory(gl.int8, [STAGES * 4, 64, 64], w.layout)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    ring = Ring(xs, ws, full, empty, STAGES)
    p = Problem(scales, a_scale, out, offsets, experts, N, GROUPS, PER_TOKEN, UNROLL)
    gl.warp_specialize(
        [
            (consume, (p, ring, buffers, 0)),
            (consume, (p, ring, buffers, 1)),
            (produce, (p, ring, x16, x32, w)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


X_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
W_LAYOUT = gl.NVMMASharedLayout(64, 8, 2)


def compile_grouped(constants):
    """`w4a8_grouped` for the current device and its compile-time arguments, in the kernel's order."""
    x16, x32 = activation_descriptors(0, 1, 128)
    w = weight_descriptor(0, 64)
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16, torch.int32
    pointers = (Address(0, dtype) for dtype in dtypes)
    return w4a8_grouped.warmup(x16, x32, w, *pointers, 2, *constants, num_warps=4, grid=(1,))


def launch(kernel, programs, device, arguments):
    """Start a compiled kernel on the current stream without the checks of the usual way, which take longer than it."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernel.run(programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


class Address:
    """What a descriptor needs of a tensor, without keeping its memory alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def activation_descriptors(address: int, rows: int, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of x [rows, columns] in boxes of 16 and of 32 rows by 128 columns; columns beyond the last read as zero."""
    base = Address(address, torch.float8_e4m3fn)
    small, large = (TensorDescriptor(base, [rows, columns], [columns, 1], [box, 128], X_LAYOUT) for box in (16, 32))
    return small, large


def weight_descriptor(address: int, rows: int) -> TensorDescriptor:
    """Of the weight tiles seen as [rows, 64], in boxes of one tile."""
    return TensorDescriptor(Address(address, torch.int8), [rows, 64], [64, 1], [64, 64], W_LAYOUT)
