"""What the warps of the Hopper kernel share: the ring of stages, and operands with the sizes known at compilation."""
# mypy: allow-untyped-defs, allow-incomplete-defs
# Annotations of aggregates are read when the kernel is built, so they cannot be strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


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
    products: gl.constexpr
    piece: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scales, a_scale, out, n, groups, per_token, blocks, tile_m, products, piece):
        self.scales = scales
        self.a_scale = a_scale
        self.out = out
        self.n = gl.constexpr(n)
        self.groups = gl.constexpr(groups)
        self.per_token = gl.constexpr(per_token)
        self.blocks = gl.constexpr(blocks)
        self.tile_m = gl.constexpr(tile_m)
        self.products = gl.constexpr(products)
        self.piece = gl.constexpr(piece)
