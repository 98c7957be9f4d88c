"""When one token or two are multiplied with GGUF blocks on int8 tensor cores, and by how many warps.

The kernel is `kernel.int8`, which needs Gluon and is imported only when used.
"""

import math

import torch

from dsv4cli.kernels.launch import takes_gluon
from dsv4cli.kernels.rows import LONGEST, planned_rows

# most tokens; rows of a tile; columns whose sums have one scale
TOKENS, ROWS, GROUP = 2, 16, 32
# warps of all programs together; most warps of a program; tiles of a program, which share the inputs' digits; groups
# that each warp loads at a time
ALL_WARPS, MOST, TILES, EACH = 2048, 16, 2, 8
# most registers of a thread: as many as let ALL_WARPS run at once on an H200
REGISTERS = 128


def takes(x: torch.Tensor, width: int) -> bool:
    """Return whether the kernel multiplies x [T, ..] by rows of this width: one bf16 token or two, on Hopper.

    Inside `exact_rows` it does not: the sums of more rows have another order.
    """
    few = 0 < planned_rows(len(x)) <= TOKENS
    return few and x.dtype == torch.bfloat16 and width <= LONGEST and width % GROUP == 0 and takes_gluon(x.device)


def shape(width: int, tiles: int) -> tuple[int, int, int]:
    """Return the tiles of a program, the warps of each, which share the columns, and groups at a time.

    Args:
        width: columns.
        tiles: of all programs.
    """
    groups, parts = width // GROUP, MOST
    while groups % parts or (parts > 1 and tiles * parts > ALL_WARPS):
        parts //= 2
    each = math.gcd(groups // parts, EACH)
    return math.gcd(min(TILES, MOST // parts), groups // parts // each), parts, each
