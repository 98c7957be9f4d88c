"""Layouts for `warp_specialized`: how threads hold weights, inputs and results, and how shared memory stores them."""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# how warps read a row's 16 words: 4 words per lane, which become two halves [row, lane, word] of a left operand
READ = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
HALVED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]],
        [], [64, 4, 2],
    )
)  # fmt: skip
# how four warps copy rows of inputs, read scales, and hold one value per thread
INPUTS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def row_in(line, BOTH: gl.constexpr):
    """Return which of a unit's matrix rows is in this line of shared memory.

    The order makes the values that a thread stores adjacent, also for both matrices, in the column order of the next
    product.
    """
    low, eight, upper = line & 7, line >> 3 & 1, line >> 4 & 3
    if BOTH:
        row = (line & 1) + (upper & 1) * 2 + eight * 4 + (upper >> 1) * 8 + (line >> 7) * 16 + (low >> 1) * 32
    else:
        row = eight + (line >> 6 & 1) * 2 + low * 4 + upper * 32 + (line >> 7) * 128
    return row


@constexpr_function
def held(columns):
    """Return the layout in which four warps hold products [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def stored(pairs, both):
    """Return the layout in which warps store results, with adjacent values of a row first.

    The shape is [pairs, 64] for both matrices and [pairs, 128] for one.
    """
    columns = [[8 << bit, 0] for bit in range(pairs.bit_length() - 4)]
    if both:
        lanes, warps = [[2, 0], [4, 0], [0, 8], [0, 2], [0, 4]], [[0, 16], [0, 32]]
        return gl.DistributedLinearLayout([[0, 1], [1, 0], *columns], lanes, warps, [], [pairs, 64])
    lanes, warps = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [1, 0], *columns], lanes, warps, [], [pairs, 128])


@constexpr_function
def lined(depth):
    """Return the layout of a slot's lines of words.

    Each step is separate, so that parallel reads use different banks.
    """
    words, rows = [[0, 1 << bit] for bit in range(4)], [[1 << bit, 0] for bit in range(8)]
    return gl.SharedLinearLayout([*words, *rows, *([[0, 16]] if depth == 2 else [])])
