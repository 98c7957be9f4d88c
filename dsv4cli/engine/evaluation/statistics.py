"""Standard errors of scores and significance tests for differences. No torch."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

# significance level of a verdict: probability that two equally good models are called better or worse
LEVEL = 0.01
# fewest differing pairs that can decide: equally good models differ in the same direction in 7 of 7 with
# probability 2/128, which is above LEVEL, whatever the distribution; in 8 of 8 with 2/256
MIN_PAIRS = 8


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error. Each is None if there are too few numbers for it."""

    value: float | None
    stderr: float | None


def mean_of(numbers: Sequence[float]) -> Mean:
    """Return the mean and standard error of independent numbers."""
    count = len(numbers)
    if not count:
        return Mean(None, None)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Mean(mean, None)
    variance = math.fsum((one - mean) ** 2 for one in numbers) / (count - 1)
    return Mean(mean, math.sqrt(variance / count))


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test for answers gained and lost.

    Equally good models lose as many answers as they gain. Unchanged answers carry no information.
    """
    count, term, tail = gained + lost, 1, 0
    for number in range(min(gained, lost) + 1):
        tail += term
        term = term * (count - number) // (number + 1)
    return min(1.0, float(Fraction(2 * tail, 1 << count)))


def student_p(mean: Mean, count: int) -> float:
    """Return the two-sided p-value of a mean under the hypothesis that it is 0 (Student's t-test).

    Args:
        mean: the mean and its standard error.
        count: how many independent numbers were averaged. With fewer than two there is no standard error, and p is 1.
    """
    if mean.value is None or mean.stderr is None or mean.value == 0:
        return 1.0
    if mean.stderr == 0:
        return 0.0
    freedom, t = count - 1, mean.value / mean.stderr
    root = math.sqrt(freedom)
    length = math.hypot(root, t)
    return _incomplete_beta(freedom / 2, 0.5, (root / length) ** 2, (t / length) ** 2)


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b).

    Args:
        a: first shape parameter, positive.
        b: second shape parameter, positive.
        x: between 0 and 1.
        rest: 1 - x, which the caller may know more exactly.

    Source: DLMF 8.17.22. The symmetry 8.17.4 keeps x in the range where the continued fraction converges quickly.
    """
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, rest, x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    return front / a / _continued_fraction(a, b, x)


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction 1 + d1 x / (1 + d2 x / (1 + …)) of DLMF 8.17.22 (modified Lentz's method)."""
    value, upper, lower, step = 1.0, 1.0, 0.0, 0
    while True:
        step += 1
        half, odd = divmod(step, 2)
        numerator = -(a + half) * (a + b + half) if odd else half * (b - half)
        term = numerator * x / ((a + step - 1) * (a + step))
        lower = 1 / (1 + term * lower)
        upper = 1 + term / upper
        value *= upper * lower
        if abs(upper * lower - 1) < sys.float_info.epsilon:
            return value
