"""Layouts for `fp8_wgmma`: codes, scales, products and inner values in registers, and buffers in shared memory."""

from triton import constexpr_function
from triton.experimental.gluon import language as gl

# warps that multiply
WARPS = 8
# one value in every thread of one warp, and of all that multiply
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
EACH_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
# how a warp reads inner values, and how shared memory holds inputs, and single values
INNER = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0]))
INPUTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=8, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# how eight warps read a tile of codes, [row, 16 bytes, lane, byte], and a word of scales for each 128 columns
CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [0, 64]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0], [32, 0]], [], [64, 128],
    )
)  # fmt: skip
SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0]], [], [64, 4]
    )
)


@constexpr_function
def held(tokens):
    """Return the layout of products [128, tokens] in the registers of eight warps."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, tokens, 32])


@constexpr_function
def operand(tokens):
    """Return the layout of a left operand [128, 32] of FP8."""
    return gl.DotOperandLayout(0, held(tokens), 4)


@constexpr_function
def group(tokens):
    """Return the number of blocks whose products are awaited at a time. More do not fit in registers."""
    return 4 if tokens <= 16 else 2


@constexpr_function
def lag(tokens):
    """Return the number of groups whose products may run while an earlier one's are added."""
    return 2 if tokens <= 8 else 1
