"""When one token or two are multiplied with GGUF blocks on int8 tensor cores, and by how many warps.

The kernel is `kernel.int8`, which needs Gluon and is imported only when used.
"""

import math

import torch

from dsv4cli.kernels.launch import takes_gluon
from dsv4cli.kernels.rows import LONGEST, planned_rows

# most tokens; rows of a program; columns whose sums have one scale
TOKENS, ROWS, GROUP = 2, 16, 32
# warps of all programs together; fewest and most warps of a program, which share the columns; groups that each loads at
# a time
ALL_WARPS, LEAST, MOST, EACH = 4096, 2, 8, 8


def takes(x: torch.Tensor, width: int) -> bool:
    """Return whether the kernel multiplies x [T, ..] by rows of this width: one bf16 token or two, on Hopper.

    Inside `exact_rows` it does not: the sums of more rows have another order.
    """
    few = 0 < planned_rows(len(x)) <= TOKENS
    return few and x.dtype == torch.bfloat16 and width <= LONGEST and width % GROUP == 0 and takes_gluon(x.device)


def shape(width: int, programs: int) -> tuple[int, int]:
    """Return the warps of each of this many programs, and groups at a time, for rows of this width."""
    groups, warps = width // GROUP, MOST
    while groups % warps or (warps > LEAST and programs * warps > ALL_WARPS):
        warps //= 2
    return warps, math.gcd(groups // warps, EACH)
