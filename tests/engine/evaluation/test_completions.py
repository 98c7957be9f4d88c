"""Completions in the styles of the public sets, judged by hand: what `judge` says of each, and in bounded time."""

import json
from collections import Counter

import pytest

from dsv4cli.engine.evaluation.extract import boxed, choice_in, number_in, same_formula
from dsv4cli.engine.evaluation.items import EvalItem
from dsv4cli.engine.evaluation.judge import judge
from tests.support.program import ROOT
from tests.support.slow import slow

# style, score, answer, choices, content, and whether the content is correct by the judgement of a person
COMPLETIONS = [json.loads(line) for line in (ROOT / "tests/data/completions.jsonl").read_text("utf-8").splitlines()]
STYLES = Counter(one["style"] for one in COMPLETIONS)


def ruling(one):
    item = EvalItem("1", [], one["score"], one["answer"], choices=tuple(one.get("choices", "")))
    return judge(item, {"content": one["content"], "tool_calls": [], "finish_reason": "stop"}).ruling


@pytest.mark.parametrize("style", STYLES)
def test_completions_are_judged_as_a_person_would(style):
    ours = [one for one in COMPLETIONS if one["style"] == style]
    assert [one for one in ours if (ruling(one) == "correct") is not one["correct"]] == []


def test_the_table_has_near_misses_and_chinese():
    assert sum(one["correct"] for one in COMPLETIONS) >= 200
    assert sum(not one["correct"] for one in COMPLETIONS) >= 130
    assert sum(count for style, count in STYLES.items() if style.endswith("-zh")) >= 25


@pytest.mark.parametrize(
    "text",
    [
        *slow("\n", "9"),
        "1,",
        "12 34/",
        "\\boxed{",
        *slow("{", "answer is not ", "#### ", "A) "),
        "选",
        *slow("\\text{", "**"),
    ],
)
def test_long_answers_take_time_in_proportion(text):
    """Quadratic time would take minutes here, and end at the limit of a test."""
    text = text * (30_000 // len(text))
    number_in(f"{text}!")
    choice_in(f"{text}!", "ABCD")
    boxed(text)


@pytest.mark.parametrize("piece", ["{", "\\frac", "\\sqrt", "^", "(", "\\text{", "1,", "x=", "\\begin{", "\\{1,"])
def test_nested_formulas_have_an_end(piece):
    text = (piece * 1000)[:999]
    assert same_formula(text, text)
    assert not same_formula(f"{text}1", f"{text}2")
