"""Sampling from logits: the most likely token, or a random one at a temperature, with or without top-p.

Source: official generate.py (`sample`: Gumbel-max). Nothing synchronizes with the device. A row's result is bit-exact
whatever the other rows are and however many.
Triton requires: fp32 with consecutive columns, and contiguous per-row numbers.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.sampling import ref


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row, the lowest column among equals: fp32 [R, V] without NaN -> int64 [R]."""
    return choose(logits, ref).greedy(logits)


def draw(logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return argmax(probability / noise) of each row, int64 [R]; for a row with temperature 0, as `greedy`.

    Among equals the lowest column wins.

    Args:
        logits: finite fp32 [R, V]. Probabilities are softmax(logits / temperature) in fp32.
        noise: fp32 [R, V] above 0; exponential noise samples from the probabilities.
        temperatures: fp32 [R], 0 or above.
    """
    return choose(logits, ref).draw(logits, noise, temperatures)


def draw_nucleus(
    logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Sample as `draw` does, from each row's nucleus (top-p).

    The nucleus holds the tokens, by descending probability, before which the probabilities sum to less than the limit,
    and all tokens as likely as the last of these. The most likely token is always in it. Sums are exact, in integer
    multiples of 2 ** -62.

    Args:
        limits: int64 [R], from `limit_of`.
    """
    return choose(logits, ref).draw_nucleus(logits, noise, temperatures, limits)


def limit_of(top_p: float) -> int:
    """Return the nucleus limit of a top_p above 0: top_p - 2 ** -16, or for 1 a limit that no sum reaches."""
    return ref.limit_of(top_p)


def chance_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the probability of one token per row at temperature 1: finite fp32 [R, V], int64 [R] -> fp32 [R]."""
    return choose(logits, ref).chance_of(logits, tokens)


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(logits))) of each row, fp32 [R, V] -> fp32 [R]; NaN if a logit of the row is not finite."""
    return choose(logits, ref).logsumexp(logits)


def noise(seeds: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return exponential noise with mean 1, fp32 [R, width] above 0, the same on every device.

    It depends only on seed, position and column. The bits of column c are m(m(m(seed) + s * position) + s * c) modulo 2
    ** 64, where m(x) is the output of splitmix64 in state x and s its step. The value is -log((k + 0.5) / 2 ** 52),
    with k their first 52 bits, computed in fp64 and rounded once.

    Args:
        seeds, positions: int64 [R].
    """
    return choose(seeds, ref).noise(seeds, positions, width)
