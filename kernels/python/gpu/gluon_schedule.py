"""Which tiles a program of the Hopper kernel computes, found from the experts' first rows alone.

Work comes in tiles of one expert, a block of weight rows and up to `tile_m` activation rows. Tiles are numbered expert
by expert, those that share weights next to each other, and dealt to the programs in turn.
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

    @gluon.constexpr_function
    def __init__(self, offsets, experts, blocks, tile_m):
        self.offsets = offsets
        self.experts = experts
        self.blocks = gl.constexpr(blocks)
        self.tile_m = gl.constexpr(tile_m)

    @gluon.jit
    def first(self):
        """The cursor of this program's first tile."""
        zero = gl.to_tensor(0)
        return Cursor(gl.program_id(0), zero - 1, zero, zero, zero, gl.load(self.offsets)).seek(self)


@aggregate
class Cursor:
    """Where a program stands: tile `tile` is one of the `tiles` of `expert`, which come after `base` others.

    The expert's activation rows are `row` .. `last` - 1. Where no tile is left, `expert` is the number of experts.
    """

    tile: gl.tensor
    expert: gl.tensor
    base: gl.tensor
    tiles: gl.tensor
    row: gl.tensor
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile, expert, base, tiles, row, last):
        self.tile = tile
        self.expert = expert
        self.base = base
        self.tiles = tiles
        self.row = row
        self.last = last

    @gluon.jit
    def seek(self, schedule):
        """Go from expert to expert until the tile is reached."""
        expert = self.expert
        base = self.base
        tiles = self.tiles
        row = self.row
        last = self.last
        while (self.tile >= base + tiles) & (expert < schedule.experts):
            base += tiles
            expert += 1
            row = last
            last = gl.load(schedule.offsets + gl.minimum(expert + 1, schedule.experts))
            tiles = gl.cdiv(last - row, schedule.tile_m) * schedule.blocks
        return Cursor(self.tile, expert, base, tiles, row, last)

    @gluon.jit
    def next(self, schedule):
        """The cursor of this program's next tile."""
        tile = self.tile + gl.num_programs(0)
        return Cursor(tile, self.expert, self.base, self.tiles, self.row, self.last).seek(schedule)

    @gluon.jit
    def place(self, schedule):
        """Block of weight rows, and first activation row."""
        heights = gl.cdiv(self.last - self.row, schedule.tile_m)
        block = (self.tile - self.base) // heights
        return block, self.row + (self.tile - self.base - block * heights) * schedule.tile_m
