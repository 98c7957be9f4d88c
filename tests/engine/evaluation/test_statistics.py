"""How sure a score is: against numbers that are known."""

import math
import random

import pytest

from dsv4cli.engine.evaluation.statistics import LEVEL, Mean, mcnemar, mean_of, student_p
from tests.support.slow import slow_rows


def test_the_error_of_a_share_is_that_of_a_coin():
    found = mean_of([1.0] * 95 + [0.0] * 5)
    assert found.value == 0.95
    assert math.isclose(found.stderr, math.sqrt(0.95 * 0.05 / 99))
    assert mean_of([]) == Mean(None, None)
    assert mean_of([3.0]) == Mean(3.0, None)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1), (1, 0, 1), (0, 5, 2 / 32), (1, 9, 22 / 1024), (9, 1, 22 / 1024), (5, 5, 1), (0, 2000, 0)],
)
def test_mcnemar_is_a_coin_that_is_thrown(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p, abs=1e-12)


# two-sided 5 %, 1 % and 0.1 % quantiles of Student's t as tables print them
@pytest.mark.parametrize(
    ("freedom", "quantiles"),
    [
        (1, (12.7062, 63.6567, 636.619)),
        (2, (4.30265, 9.92484, 31.5991)),
        (4, (2.77645, 4.60409, 8.61030)),
        (9, (2.26216, 3.24984, 4.78091)),
        (29, (2.04523, 2.75639, 3.65941)),
        (120, (1.97993, 2.61742, 3.37345)),
        (10**6, (1.959966, 2.575834, 3.290536)),
    ],
)
def test_student_p_agrees_with_tables(freedom, quantiles):
    for t, p in zip(quantiles, (0.05, 0.01, 0.001), strict=True):
        assert student_p(Mean(t, 1.0), freedom + 1) == pytest.approx(p, rel=3e-5)
        assert student_p(Mean(-2 * t, 2.0), freedom + 1) == pytest.approx(p, rel=3e-5)


@pytest.mark.parametrize("t", [1e-9, 0.01, 0.5, 1.0, 3.0, 40.0, 1e5])
def test_student_p_agrees_with_closed_forms(t):
    cauchy = 2 * math.atan(1 / t) / math.pi
    assert student_p(Mean(t, 1.0), 2) == pytest.approx(cauchy, rel=1e-12)
    two = 2 / (2 + t * t + t * math.sqrt(2 + t * t))  # 1 - t / sqrt(2 + t²) without cancellation
    assert student_p(Mean(t, 1.0), 3) == pytest.approx(two, rel=1e-12)


def test_student_p_where_there_is_nothing_to_divide_by():
    assert student_p(Mean(0.0, 0.0), 9) == student_p(Mean(None, None), 0) == student_p(Mean(5.0, None), 1) == 1.0
    assert student_p(Mean(1e-9, 0.0), 9) == 0.0
    assert student_p(Mean(1e200, 1.0), 9) == 0.0


@pytest.mark.parametrize(("items", "trials"), [(2, 8000), *slow_rows((5, 8000), (30, 10000), (200, 1500))])
def test_student_p_of_equally_good_models_is_uniform(items, trials):
    """A normal distribution in its place has 24 % below 0.01 for 2 items, 6 % for 5 and 1.5 % for 30."""
    rng = random.Random(items)
    ps = [student_p(mean_of([rng.gauss() for _ in range(items)]), items) for _ in range(trials)]
    for level in (LEVEL, 0.1):
        error = math.sqrt(level * (1 - level) / trials)
        assert abs(sum(p < level for p in ps) / trials - level) < 3 * error


def test_equal_models_seldom_differ_significantly():
    rng = random.Random(0)
    ps = [mcnemar(changed := sum(rng.random() < 0.5 for _ in range(60)), 60 - changed) for _ in range(1000)]
    assert 0.002 < sum(p < 0.01 for p in ps) / 1000 <= 0.015  # an exact test errs on the side of chance
