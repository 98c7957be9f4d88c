"""How warps hold the tensors of the int8 kernels, in Gluon; `int8` says what their dimensions are."""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@constexpr_function
def rows_layout(warps):
    """Return how warps hold words of [warp, half of 16 rows, g, t]."""
    return gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [warps, 1, 1, 1], [3, 2, 1, 0])


@constexpr_function
def sums_layout(warps):
    """Return how warps hold sums of [warp, half of 16 rows, g, t, column % 2]."""
    return gl.BlockedLayout([1, 2, 1, 1, 2], [1, 1, 8, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@constexpr_function
def products_layout(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def inputs_layout(passes, warps):
    """Return how warps hold inputs of [pass, warp, octet, column of it]."""
    return gl.BlockedLayout([passes, 1, 1, 8], [1, 1, 32, 1], [1, warps, 1, 1], [3, 2, 1, 0])


@constexpr_function
def digits_layout(tiles, parts):
    """Return how warps hold digits as words of [token, group, tile, part, t, digit, half of an octet]; one group."""
    lanes = [[0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 2, 0, 0], [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 2, 0], [1] + [0] * 6]
    of_parts = [[0, 0, 0, 1 << bit, 0, 0, 0] for bit in range(parts.bit_length() - 1)]
    of_tiles = [[0, 0, 1 << bit, 0, 0, 0, 0] for bit in range(tiles.bit_length() - 1)]
    shape = [2, 1, tiles, parts, 4, 4, 2]
    return gl.DistributedLinearLayout([[0] * 6 + [1]], lanes, of_parts + of_tiles, [], shape)


@constexpr_function
def factors_layout(tiles, parts):
    """Return how warps hold factors of [tile, part, t]."""
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    of_parts = [[0, 1 << bit, 0] for bit in range(parts.bit_length() - 1)]
    of_tiles = [[1 << bit, 0, 0] for bit in range(tiles.bit_length() - 1)]
    return gl.DistributedLinearLayout([], lanes, of_parts + of_tiles, [], [tiles, parts, 4])


@constexpr_function
def memory_layout(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(rank - 1, -1, -1)])


@constexpr_function
def only(dim, rank, layout):
    """Return how numbers along one dimension of a layout are held."""
    for other in reversed([one for one in range(rank) if one != dim]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(values, DIM: gl.constexpr, RANK: gl.constexpr):
    """Return values along one dimension as a tensor of RANK dimensions."""
    for other in gl.static_range(RANK):
        if other != DIM:
            values = gl.expand_dims(values, other)
    return values


@gluon.jit
def numbers(COUNT: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr):
    """Return 0 to COUNT - 1 along one dimension of a layout."""
    return along(gl.arange(0, COUNT, only(DIM, RANK, layout)), DIM, RANK)
