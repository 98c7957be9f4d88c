"""Which attention `warp_specialized` computes: its Gluon is imported where it is used."""

import torch

from dsv4cli.kernels.launch import cdiv, takes_gluon

# what a program of `warp_specialized` takes: values of a row, at most so many heads, so many pairs that are turned
WIDTH, HEADS, PAIRS = 512, 64, 64
# the fewest programs that it pays for: one for each multiprocessor of an H200
FEWEST = 132


def suits(q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor, turned: int) -> bool:
    """Whether `warp_specialized` takes queries [T, H, d] over such rows, and is the fastest for them. turned: pairs."""
    tokens, heads, width = q.shape
    if q.dtype != torch.bfloat16 or width != WIDTH or heads <= 16 or turned > PAIRS:
        return False
    if tokens * cdiv(heads, HEADS) < FEWEST or not takes_gluon(q.device):
        return False
    # copies of 16 bytes
    return not any(x.stride(-2) % 16 or x.storage_offset() % 8 for x in (q, window, entries))


def attended(inputs, sink, turns, o, turned, shape) -> None:
    """As `warp_specialized.attended`."""
    from dsv4cli.kernels.attention.kernel import warp_specialized

    warp_specialized.attended(inputs, sink, turns, o, turned, shape)
