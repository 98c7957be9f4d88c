"""How sure a score is: against numbers that are known."""

import math
import random

import pytest

from dsv4cli.engine.evaluation.statistics import Mean, chance_of, mcnemar, mean_of


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


def test_a_mean_far_from_zero_is_no_chance():
    assert chance_of(Mean(1.959964, 1.0)) == pytest.approx(0.05, abs=1e-6)
    assert chance_of(Mean(-2.575829, 1.0)) == pytest.approx(0.01, abs=1e-6)
    assert (chance_of(Mean(0.0, 0.0)), chance_of(Mean(1e-9, 0.0)), chance_of(Mean(None, None))) == (1.0, 0.0, 1.0)
    assert chance_of(Mean(5.0, None)) == 1.0


def test_equal_models_seldom_differ_significantly():
    rng = random.Random(0)
    ps = [mcnemar(changed := sum(rng.random() < 0.5 for _ in range(60)), 60 - changed) for _ in range(1000)]
    assert 0.002 < sum(p < 0.01 for p in ps) / 1000 <= 0.015  # an exact test errs on the side of chance
