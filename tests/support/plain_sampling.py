"""Sampling by its definition, in plain Python: what a token's probability is after biases, penalties and filters."""

import math
from collections import Counter
from collections.abc import Sequence

from dsv4cli.engine.settings import Sampling


def plain_chances(
    logits: Sequence[float], prompt: Sequence[int], completion: Sequence[int], sampling: Sampling
) -> list[float]:
    """The probability of each next token. Order of the operations: as vLLM's Sampler documents it."""
    values = list(logits)
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in {*prompt, *completion}:
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, count in Counter(completion).items():
        values[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    if sampling.temperature == 0:
        return [float(token == values.index(max(values))) for token in range(len(values))]
    chances = softmax([value / sampling.temperature for value in values])
    likely = [chance >= sampling.min_p * max(chances) for chance in chances]
    smallest = sorted(chances, reverse=True)[min(sampling.top_k or len(chances), len(chances)) - 1]
    chances = [chance if kept and chance >= smallest else 0.0 for chance, kept in zip(chances, likely, strict=True)]
    return scaled(plain_nucleus(scaled(chances), sampling.top_p))


def softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    return scaled([math.exp(value - top) for value in values])


def scaled(chances: Sequence[float]) -> list[float]:
    """Probabilities that sum to 1."""
    total = math.fsum(chances)
    return [chance / total for chance in chances]


def plain_nucleus(chances: Sequence[float], top_p: float) -> list[float]:
    """The smallest set of likeliest tokens that has at least top_p, but for 2 ** -16, with all that are as likely; all
    of them for 1."""
    if top_p == 1:
        return list(chances)
    smallest, total = max(chances), 0.0
    for chance in sorted(chances, reverse=True):
        smallest = smallest if total >= top_p - 2.0**-16 else chance
        total += chance
    return [chance if chance >= smallest else 0.0 for chance in chances]
