"""Which tiles a program of the Hopper kernel computes, found from the experts' first rows alone.

Work comes in tiles of one expert, `tile_n` weight rows and up to `tile_m` activation rows. Tiles are numbered expert by
expert, those that share weights next to each other; with three passes the experts with many rows come first, so that
short tiles fill what long ones leave. The programs take the tiles in turn, forwards and backwards.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# Annotations of aggregates are read when the kernel is built, so they cannot be strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Schedule:
    """First rows of the experts, and sizes known when the kernel is compiled; `blocks` of weight rows make N."""

    offsets: gl.tensor
    experts: gl.tensor
    blocks: gl.constexpr
    tile_m: gl.constexpr
    passes: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, offsets, experts, blocks, tile_m, passes):
        self.offsets = offsets
        self.experts = experts
        self.blocks = gl.constexpr(blocks)
        self.tile_m = gl.constexpr(tile_m)
        self.passes = gl.constexpr(passes)

    @gluon.jit
    def first(self):
        """The cursor of this program's first tile."""
        zero = gl.to_tensor(0)
        step = 2 * (gl.num_programs(0) - gl.program_id(0)) - 1
        return Cursor(gl.program_id(0), step, zero, zero - 1, zero, zero, zero, zero).seek(self)


@aggregate
class Cursor:
    """Where a program stands: tile `tile` is one of the `tiles` of `expert`, which come after `base` others.

    The expert's activation rows are `row` .. `last` - 1. The next tile of the program is `step` further on. No tile is
    left where `walk` has reached the number of passes.
    """

    tile: gl.tensor
    step: gl.tensor
    walk: gl.tensor
    expert: gl.tensor
    base: gl.tensor
    tiles: gl.tensor
    row: gl.tensor
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile, step, walk, expert, base, tiles, row, last):
        self.tile = tile
        self.step = step
        self.walk = walk
        self.expert = expert
        self.base = base
        self.tiles = tiles
        self.row = row
        self.last = last

    @gluon.jit
    def seek(self, schedule):
        """Go from expert to expert until the tile is reached."""
        walk = self.walk
        expert = self.expert
        base = self.base
        tiles = self.tiles
        row = self.row
        last = self.last
        while (self.tile >= base + tiles) & (walk < schedule.passes):
            base += tiles
            expert += 1
            if expert == schedule.experts:
                expert = gl.to_tensor(0)
                walk += 1
            row = gl.load(schedule.offsets + expert)
            last = gl.load(schedule.offsets + expert + 1)
            rows = last - row
            tiles = gl.cdiv(rows, schedule.tile_m) * schedule.blocks
            if schedule.passes > 1:
                short = (rows <= schedule.tile_m // 2).to(gl.int32) + (rows <= schedule.tile_m // 4).to(gl.int32)
                tiles = gl.where(short == walk, tiles, 0)
        return Cursor(self.tile, self.step, walk, expert, base, tiles, row, last)

    @gluon.jit
    def next(self, schedule):
        """The cursor of this program's next tile."""
        step = 2 * gl.num_programs(0) - self.step
        tile = self.tile + self.step
        return Cursor(tile, step, self.walk, self.expert, self.base, self.tiles, self.row, self.last).seek(schedule)

    @gluon.jit
    def place(self, schedule):
        """Block of weight rows, and first activation row."""
        heights = gl.cdiv(self.last - self.row, schedule.tile_m)
        block = (self.tile - self.base) // heights
        return block, self.row + (self.tile - self.base - block * heights) * schedule.tile_m
