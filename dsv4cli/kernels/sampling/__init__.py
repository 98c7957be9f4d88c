"""From logits to tokens: the likeliest, or one drawn at a temperature, from all tokens or from the likeliest ones.

Source: official generate.py (`sample`: Gumbel-max). Nothing waits for the device. A row's result, to the last bit,
depends on its own numbers only: neither on the other rows nor on how many there are.
Triton: fp32 with consecutive columns; a row's numbers one behind the other.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.sampling import ref


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The column of the largest logit of each row, of equals the lowest: fp32 [R, V] without NaN -> int64 [R]."""
    return choose(logits, ref).greedy(logits)


def draw(logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """argmax(chance / noise) of each row, of equals the lowest column; of a row with temperature 0, as `greedy`.

    logits: finite fp32 [R, V]; noise: fp32 [R, V] above 0, exponential for draws that follow the chances;
    temperatures: fp32 [R], 0 or above. Chances are softmax(logits / temperature) in fp32. Returns int64 [R].
    """
    return choose(logits, ref).draw(logits, noise, temperatures)


def draw_nucleus(
    logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """As `draw`, each row over its nucleus.

    limits: int64 [R] of `limit_of`. The nucleus: by falling chance, the tokens before which the chances sum to less
    than the limit, and all that are as likely as the last of these; the likeliest is always in it. Sums are exact, in
    whole numbers of 2 ** -62.
    """
    return choose(logits, ref).draw_nucleus(logits, noise, temperatures, limits)


def limit_of(top_p: float) -> int:
    """The limit of the nucleus of probability top_p, above 0: top_p - 2 ** -16; for 1 one that no sum reaches."""
    return ref.limit_of(top_p)


def chance_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The probability of a token of each row, at temperature 1: finite fp32 [R, V], int64 [R] -> fp32 [R]."""
    return choose(logits, ref).chance_of(logits, tokens)


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of each row, fp32 [R, V] -> fp32 [R]; NaN where a logit of the row is not finite."""
    return choose(logits, ref).logsumexp(logits)


def noise(seeds: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Exponential noise of mean 1 that depends on seed, position and column only, on every device the same.

    seeds, positions: int64 [R]. The bits of column c are m(m(m(seed) + s * position) + s * c) modulo 2 ** 64, where
    m(x) is what splitmix64 gives in state x and s its step; the value is -log((k + 0.5) / 2 ** 52) of their first 52,
    k, taken in fp64 and rounded once.
    Returns fp32 [R, width], above 0.
    """
    return choose(seeds, ref).noise(seeds, positions, width)
