"""Batch-invariant plain PyTorch: on a CPU, a row gets the same bits alone and among up to ROWS_ALIKE rows.

Widths must be multiples of 32. PyTorch and its BLAS use different code, with different rounding, for one row, for a few
rows and for many rows, and for the values that do not fill a whole vector. Here, small inputs are multiplied in
products of one fixed shape, and every value is part of a whole vector.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F

from dsv4cli.kernels.rows import ROWS_ALIKE

# rows of each product; MKL sums fewer rows in another order
TILE = 4
# values in an iteration of PyTorch's vectorized loops: two AVX-512 vectors, more vectors on other CPUs
VECTORS = 32


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T: fp32 [T, K], fp32 [N, K] -> fp32 [T, N]."""
    count = x.shape[0]
    if not 0 < count <= TILE:
        return next(products(x, [weight]))
    y = F.linear(filled(x), weight)
    return y if count == TILE else y[:count]


def products(x: torch.Tensor, weights: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield x @ weight.T for each weight, in order: fp32 [T, K], fp32 [N, K] each -> fp32 [T, N] each."""
    count = x.shape[0]
    alone = count <= TILE or count > ROWS_ALIKE
    tiles = [x if count > ROWS_ALIKE else filled(tile) for tile in ([x] if alone else x.split(TILE))]
    for weight in weights:
        parts = [F.linear(tile, weight) for tile in tiles]
        del weight  # it may be a dequantized copy, and the next one is made before the loop lets go of this one
        yield (parts[0] if alone else torch.cat(parts))[:count]


def grouped_product(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one product per group: fp32 [T, G, K], G times fp32 [N, K] -> fp32 [T, G, N]."""
    count = x.shape[0]
    if not 0 < count <= TILE:
        return torch.stack([product(*pair) for pair in zip(x.unbind(1), weights, strict=True)], 1)
    return torch.stack([F.linear(*pair) for pair in zip(filled(x).unbind(1), weights, strict=True)], 1)[:count]


def filled(x: torch.Tensor) -> torch.Tensor:
    """Return up to TILE rows, repeated until there are exactly TILE. An empty x stays empty."""
    count = x.shape[0]
    if count in (0, TILE):
        return x
    repeated = torch.cat([x] * -(-TILE // count))
    return repeated if TILE % count == 0 else repeated[:TILE]


def each(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return function(x) for an elementwise function and x [..., W], padded to whole vectors."""
    width = x.shape[-1]
    if width % VECTORS == 0:
        return function(x)
    # repeating takes less time than padding
    padded = torch.cat([x] * (VECTORS // width), -1) if VECTORS % width == 0 else F.pad(x, (0, -width % VECTORS))
    return function(padded)[..., :width]
