"""What `dsv4 eval` says beside its table."""

from collections import Counter

import pytest

from dsv4cli.commands.eval.report import _remarks
from dsv4cli.engine.evaluation.statistics import Mean
from dsv4cli.engine.evaluation.summary import ScoreSummary

LEFT_OUT = "the score excludes"


@pytest.mark.parametrize(
    ("correct", "wrong", "cut", "expected"),
    [
        (3, 1, 0, []),
        (3, 1, 1, [f"{LEFT_OUT} 1 answer cut off at the limit; with it it would be between 60.0 and 80.0 %"]),
        (0, 2, 3, [f"{LEFT_OUT} 3 answers cut off at the limit; with them it would be between 0.0 and 60.0 %"]),
        (2, 0, 2, [f"{LEFT_OUT} 2 answers cut off at the limit; with them it would be between 50.0 and 100.0 %"]),
        (0, 0, 1, ["there is no score: 1 answer was cut off at the limit"]),
        (0, 0, 1200, ["there is no score: 1,200 answers were cut off at the limit"]),
    ],
)
def test_a_score_without_answers_that_were_cut_says_between_what_it_lies(correct, wrong, cut, expected):
    rulings = Counter(correct=correct, wrong=wrong, cut=cut)
    none = Mean(None, None)
    summary = ScoreSummary(correct + wrong + cut, rulings, none, 0, 0, 0, none, 0, 0, 0)
    assert list(_remarks(summary)) == expected
