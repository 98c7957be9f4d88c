"""Plain PyTorch whose rows do not depend on each other: on a CPU a row of up to ROWS_ALIKE gets the bits that it gets
alone, at widths in multiples of 32.

PyTorch and its BLAS choose other code, with other roundings, for one row, for a few and for many, and for the values
that fill no whole vector. Here few rows are multiplied in products of one shape, and each value is in a vector.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dsv4cli.kernels.rows import ROWS_ALIKE

# rows of a product; of fewer MKL sums in another order
TILE = 4
# values that PyTorch's loops take at once: two vectors of AVX-512, more elsewhere
VECTORS = 32


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T: fp32 [T, K], fp32 [N, K] -> fp32 [T, N]."""
    count = x.shape[0]
    if count > ROWS_ALIKE:
        return F.linear(x, weight)
    if count < TILE:
        return F.linear(_filled(x), weight)[:count]
    return torch.cat([F.linear(_filled(tile), weight) for tile in x.split(TILE)])[:count]


def _filled(x: torch.Tensor) -> torch.Tensor:
    """Up to TILE rows as many as a product has: they come again."""
    count = x.shape[0]
    return x if count in (0, TILE) else torch.cat([x] * -(-TILE // count))[:TILE]


def each(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x) of a function that takes each value for itself: x [..., W], of the same shape."""
    width = x.shape[-1]
    return function(F.pad(x, (0, -width % VECTORS)))[..., :width] if width % VECTORS else function(x)
