"""Is a model as good as another? What pairs of results say."""

import math
import random

import pytest

from dsv4cli.engine.evaluation.outcome import Outcome
from dsv4cli.engine.evaluation.pairing import pair
from dsv4cli.engine.evaluation.statistics import LEVEL, MIN_PAIRS
from dsv4cli.engine.evaluation.summary import by_task, summary_of
from tests.support.slow import slow_rows


def outcomes(rulings, nlls=None, task="t"):
    nlls = nlls or [None] * len(rulings)
    return [
        Outcome(n, f"i{n}", task, "exact", ruling, f"{ruling} given", 5, 2, nll=nll)
        for n, (ruling, nll) in enumerate(zip(rulings, nlls, strict=True))
    ]


def rulings(word):
    return [{"+": "correct", "-": "wrong", "c": "cut", "u": "unjudged"}[letter] for letter in word]


@pytest.mark.parametrize(
    ("own", "other", "verdict", "gained", "lost"),
    [
        ("+-+-", "+-+-", "same", 0, 0),
        ("-" * 8 + "+", "+" * 9, "worse", 0, 8),
        ("+" * 9, "-" * 8 + "+", "better", 8, 0),
        ("-" * 7 + "++", "+" * 9, "different", 0, 7),
        ("c" * 9, "+" * 9, "different", 0, 0),  # what was cut is no loss
        ("+" * 9, "u" * 9, "different", 0, 0),
    ],
)
def test_answers_that_changed(own, other, verdict, gained, lost):
    found = pair(outcomes(rulings(own)), outcomes(rulings(other)))
    assert (found.verdict, found.gained, found.lost) == (verdict, gained, lost)
    assert found.record()["difference"] == (None if not found.compared else (gained - lost) / found.compared)
    assert len(found.changed) == sum(one != two for one, two in zip(own, other, strict=True))


@pytest.mark.parametrize(
    ("change", "verdict", "numbers"),
    [
        ([0.0] * 10, "same", 0),
        ([1e-7] * 10, "same", 0),  # what rounding makes, however often
        ([0.0] * 9 + [1e-3], "different", 1),
        ([0.1, -0.1] * 5, "different", 10),
        ([0.1, 0.11] * 5, "worse", 10),
        ([-0.1, -0.11] * 5, "better", 10),
    ],
)
def test_numbers_that_changed(change, verdict, numbers):
    before = [1.0 + n / 7 for n in range(10)]
    after = [one + more for one, more in zip(before, change, strict=True)]
    found = pair(outcomes(rulings("+" * 10), after), outcomes(rulings("+" * 10), before))
    assert (found.verdict, found.numbers, found.nll_items) == (verdict, numbers, 10)
    assert found.largest == pytest.approx(max(map(abs, change)))
    assert found.changed == []


@pytest.mark.parametrize(("items", "changed"), [(2, 2), (5, 5), (7, 7), (40, 7)])
def test_too_few_changed_numbers_give_no_verdict(items, changed):
    before = [1.0] * items
    after = [2.0 + n / 100 if n < changed else 1.0 for n in range(items)]
    found = pair(outcomes(rulings("+" * items), after), outcomes(rulings("+" * items), before))
    assert (found.verdict, found.numbers, found.nll_p) == ("different", changed, None)
    assert found.record()["nll"]["p"] is None
    assert found.record()["min_pairs"] == MIN_PAIRS == 8


@pytest.mark.parametrize(("items", "trials"), [(2, 300), (5, 300), *slow_rows((30, 1000), (200, 200))])
def test_equally_good_models_get_a_verdict_as_seldom_as_stated(items, trials):
    """Both tests are made of each pair of results; together they keep the level of a verdict."""
    rng = random.Random(items)
    base = outcomes(rulings("+-" * (items // 2) + "+" * (items % 2)), [1.0] * items)
    decided = 0
    for _ in range(trials):
        flips = rulings("".join(rng.choice("+-") for _ in range(items)))
        decided += pair(outcomes(flips, [rng.gauss(1.0) for _ in range(items)]), base).verdict != "different"
    most = LEVEL * trials + 3 * math.sqrt(LEVEL * (1 - LEVEL) * trials)
    assert decided == 0 if items < MIN_PAIRS else decided <= most


def test_two_tests_share_the_level():
    lost = rulings("-" * 8 + "+"), rulings("+" * 9)
    assert pair(*map(outcomes, lost)).verdict == "worse"  # p = 0.0078
    noise = [1 + (-1) ** n / 10 for n in range(9)]
    both = pair(outcomes(lost[0], noise), outcomes(lost[1], [1.0] * 9))
    assert (both.level, both.verdict) == (LEVEL / 2, "different")


def test_a_loss_of_either_kind_is_a_loss():
    found = pair(outcomes(rulings("-" * 10), [1.0] * 10), outcomes(rulings("+" * 10), [2.0] * 10))
    assert found.verdict == "worse"


def test_a_summary_leaves_out_what_was_cut():
    found = summary_of(outcomes(rulings("++-ccu")))
    assert (found.items, found.judged, found.score.value) == (6, 3, 2 / 3)
    assert found.record()["cut"] == 2
    assert by_task(outcomes(rulings("+"), task="")) == {}
    continued = [
        Outcome(n, f"i{n}", "t", "continuation", "correct", "", 5, 4, nll=1.0, common_prefix=prefix)
        for n, prefix in enumerate((0, 3, 1))
    ]
    found = summary_of([*continued, *outcomes(rulings("+"))])
    assert (found.continuations, found.first_token, found.common_prefix, found.continuation_tokens) == (3, 2, 4, 12)
    assert [*by_task(outcomes(rulings("+")) + outcomes(rulings("-"), task="u"))] == ["t", "u"]
