"""From logits to tokens: the likeliest, or one drawn at a temperature from the nucleus of probability top_p.

Source: official generate.py (`sample`: Gumbel-max). Nothing waits for the device.
Triton: fp32 with consecutive columns, seeds and positions one behind the other.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.sampling import ref


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The column of the largest logit of each row, of equals the lowest: fp32 [R, V] without NaN -> int64 [R]."""
    return choose(logits, ref).greedy(logits)


def draw(logits: torch.Tensor, noise: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """argmax(chance / noise) of each row over its nucleus, of equals the lowest column.

    logits: finite fp32 [R, V]; noise: fp32 [R, V] above 0, exponential for draws that follow the chances; temperature
    above 0. Chances are softmax(logits / temperature) in fp32. The nucleus, for top_p below 1: by falling
    chance, the tokens before which the chances sum to less than top_p - 2 ** -16, and all that are as likely as the
    last of these; the likeliest is always in it. Sums are exact, in whole numbers of 2 ** -62. Returns int64 [R].
    """
    return choose(logits, ref).draw(logits, noise, temperature, top_p)


def noise(seeds: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Exponential noise of mean 1 that depends on seed, position and column only, on every device the same.

    seeds, positions: int64 [R]. The bits of column c are m(m(m(seed) + s * position) + s * c) modulo 2 ** 64, where
    m(x) is what splitmix64 gives in state x and s its step; the value is -log((k + 0.5) / 2 ** 52) of their first 52,
    k, taken in fp64 and rounded once.
    Returns fp32 [R, width], above 0.
    """
    return choose(seeds, ref).noise(seeds, positions, width)
