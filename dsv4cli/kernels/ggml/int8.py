"""When one token or two are multiplied with GGUF blocks on int8 tensor cores, and by how many warps.

The kernel is `kernel.int8`, which needs Gluon and is imported only when used.
"""

import math
from typing import NamedTuple

import torch

from dsv4cli.kernels.launch import takes_gluon
from dsv4cli.kernels.rows import planned_rows

# most tokens; rows of a tile; columns whose sums have one scale
TOKENS, ROWS, GROUP = 2, 16, 32
# tiles from which on a program has two, for which it divides the inputs once
MANY = 512
# warps of all programs together; fewest and most warps of a program, which share the columns; groups that each loads at
# a time
ALL_WARPS, LEAST, MOST, EACH = 4096, 2, 8, 8


class Int8Tiles(NamedTuple):
    """The tiles of a program, its warps, and the groups that each warp loads at a time."""

    tiles: int
    warps: int
    each: int


def takes(x: torch.Tensor, width: int) -> bool:
    """Return whether x [T, ..] times rows of this width is supported: bf16 on Hopper, few tokens, unless more rows are
    exact.
    """
    few = 0 < planned_rows(len(x)) <= TOKENS
    return few and x.dtype == torch.bfloat16 and width % GROUP == 0 and takes_gluon(x.device)


def shape(width: int, tiles: int) -> Int8Tiles:
    """Return the shape of programs for this many tiles of rows of this width."""
    groups, together, warps = width // GROUP, 2 if tiles >= MANY else 1, MOST
    while groups % warps or (warps > LEAST and tiles // together * warps > ALL_WARPS):
        warps //= 2
    return Int8Tiles(together, warps, math.gcd(groups // warps, EACH))
