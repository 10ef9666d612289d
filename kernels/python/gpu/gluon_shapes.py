"""Heights of the Hopper kernel's tiles, the pieces that they are made of, and what registers hold of them."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def next_height(height):
    """The next larger height of a tile."""
    return {16: 32, 32: 64, 64: 80, 80: 96, 96: 128, 128: 144, 144: 160, 160: 192, 192: 256}[height]


@gluon.constexpr_function
def pad(rows):
    """The smallest power of two that holds so many rows."""
    return 1 << (rows - 1).bit_length()


@gluon.constexpr_function
def pieces(height, most):
    """Rows of the pieces that make a height: powers of two, `most` at most, the larger first."""
    return [most] * (height // most) + [rows for rows in (64, 32, 16) if rows < most and height % most & rows]


@gluon.constexpr_function
def count_pieces(height, most):
    """How many pieces make a height."""
    return len(pieces(height, most))


@gluon.constexpr_function
def rows_of(height, most, index):
    """Rows of one of a tile's pieces."""
    return pieces(height, most)[index]


@gluon.constexpr_function
def rows_before(height, most, index):
    """Rows of a tile before one of its pieces."""
    return sum(pieces(height, most)[:index])


@gluon.constexpr_function
def registers_for(blocks, height, most, operands):
    """Registers of a thread for all sums, two products in flight, and the operands of so many blocks."""
    return blocks * height // 2 + pieces(height, most)[0] + 32 * operands


@gluon.constexpr_function
def groups_between_stops(groups, each, products):
    """How many groups make about so many products, if a group makes `each`: a divisor of all groups."""
    return max(d for d in range(1, groups + 1) if groups % d == 0 and (d == 1 or d * each <= products))


@gluon.constexpr_function
def product_layout(height):
    """Where a product of 64 weight rows and so many activation rows lies in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, height, 32])
