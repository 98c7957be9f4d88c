"""How sure is a score, and is a difference more than chance? No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

# below this probability of chance a difference is significant
LEVEL = 0.01


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error; None where there are too few numbers for one."""

    value: float | None
    stderr: float | None


def mean_of(numbers: Sequence[float]) -> Mean:
    """Of numbers that are drawn independently."""
    count = len(numbers)
    if not count:
        return Mean(None, None)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Mean(mean, None)
    variance = math.fsum((one - mean) ** 2 for one in numbers) / (count - 1)
    return Mean(mean, math.sqrt(variance / count))


def mcnemar(gained: int, lost: int) -> float:
    """The probability that a fair coin parts as unevenly as these changed answers do: McNemar's exact test, two-sided.

    Equal models lose as many answers as they gain; those that did not change say nothing.
    """
    count, term, tail = gained + lost, 1, 0
    for number in range(min(gained, lost) + 1):
        tail += term
        term = term * (count - number) // (number + 1)
    return min(1.0, float(Fraction(2 * tail, 1 << count)))


def chance_of(mean: Mean) -> float:
    """The probability that a mean of many numbers lies as far from 0 by chance; two-sided, normal."""
    if mean.value is None or mean.stderr is None or mean.value == 0:
        return 1.0
    if mean.stderr == 0:
        return 0.0
    return math.erfc(abs(mean.value) / mean.stderr / math.sqrt(2))
