"""Selects the attention for `warp_specialized`, which needs Gluon and is imported only when used."""

import torch

from dsv4cli.kernels.launch import cdiv, takes_gluon

# what a program of `warp_specialized` supports: values of a row, and the most heads and rotated pairs
WIDTH, HEADS, PAIRS = 512, 64, 64
# fewest programs for which it is faster: one per multiprocessor of an H200
FEWEST = 132


def suits(q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor, turned: int) -> bool:
    """Return whether `warp_specialized` supports queries [T, H, d] over these rows and is the fastest for them.

    turned: rotated pairs.
    """
    tokens, heads, width = q.shape
    if q.dtype != torch.bfloat16 or width != WIDTH or heads <= 16 or turned > PAIRS:
        return False
    if tokens * cdiv(heads, HEADS) < FEWEST or not takes_gluon(q.device):
        return False
    # copies of 16 bytes
    return not any(x.stride(-2) % 16 or x.storage_offset() % 8 for x in (q, window, entries))


def attended(inputs, sink, turns, o, turned, shape) -> None:
    """Run `warp_specialized.attended`."""
    from dsv4cli.kernels.attention.kernel import warp_specialized

    warp_specialized.attended(inputs, sink, turns, o, turned, shape)
