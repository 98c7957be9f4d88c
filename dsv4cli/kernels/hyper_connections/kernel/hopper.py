"""Selects the streams for `warp_specialized`, which needs Gluon and is imported only when used."""

import torch

from dsv4cli.kernels.card import multiprocessors
from dsv4cli.kernels.launch import cdiv, takes_gluon

# what a program of `warp_specialized` computes: streams, tokens, columns at a time, places for sums (one stays free)
STREAMS, TOKENS, COLUMNS, PLACES = 4, 128, 32, 32
# fewest tokens for which it is faster; most parts of the columns; the time of a program's first loads and last stores,
# in steps
FEWEST, MOST_SPLITS, START = 768, 16, 4


def suits(x: torch.Tensor, streams: torch.Tensor, lines: int) -> bool:
    """Return whether `warp_specialized` supports x [T, D] and streams [T, N, D], projected to this many lines.

    x: rows of consecutive columns.
    """
    count, number, width = streams.shape
    if x.dtype != torch.bfloat16 or streams.dtype != torch.bfloat16 or count < FEWEST or number != STREAMS:
        return False
    if width % COLUMNS or not PLACES // 2 <= lines < PLACES or not takes_gluon(streams.device):
        return False
    # copies of 16 bytes
    return streams.is_contiguous() and not any(one.stride(0) % 8 or one.storage_offset() % 8 for one in (x, streams))


def splits(count: int, width: int, device: torch.device) -> int:
    """Return the number of parts of the columns that takes the fewest sequential steps.

    Each round of programs adds START steps.
    """
    tiles, number, steps = cdiv(count, TOKENS), multiprocessors(device), width // COLUMNS
    return min(range(1, MOST_SPLITS + 1), key=lambda parts: cdiv(tiles * parts, number) * (cdiv(steps, parts) + START))


def mixed_and_projected(
    x: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    weights: torch.Tensor,
    mixed: torch.Tensor,
) -> torch.Tensor:
    """Run `warp_specialized.mixed_and_projected` into `mixed`, and return the parts."""
    from dsv4cli.kernels.hyper_connections.kernel import warp_specialized

    count, _, width = streams.shape
    parts = streams.new_empty(splits(count, width, streams.device), count, PLACES, dtype=torch.float32)
    warp_specialized.mixed_and_projected(x, streams, post, comb, weights, mixed, parts)
    return parts
