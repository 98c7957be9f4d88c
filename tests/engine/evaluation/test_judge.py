"""Is an answer right? By each rule, and where an answer has no end."""

import signal

import pytest

from dsv4cli.engine.evaluation import judge as judging
from dsv4cli.engine.evaluation.items import EvalItem
from dsv4cli.engine.evaluation.judge import judge

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}
CALLS = [{"name": "f", "arguments": {"a": 1, "b": 2}}]


def reply(content, finish="stop", calls=()):
    return {"content": content, "tool_calls": list(calls), "finish_reason": finish}


def judged(score, answer, content, **more):
    item = EvalItem("1", [], score, answer, choices=("A", "B") if score == "choice" else ())
    found = judge(item, reply(content, **more))
    return found.ruling, found.given


@pytest.mark.parametrize(
    ("score", "answer", "content", "found"),
    [
        ("exact", "Rome", " Rome\n", ("correct", "Rome")),
        ("exact", "Rome", "Rome.", ("wrong", "Rome.")),
        ("exact", "\\frac12", "So \\boxed{\\dfrac{1}{2}}.", ("correct", "\\dfrac{1}{2}")),
        ("exact", "\\frac12", "So \\boxed{2}.", ("wrong", "2")),
        ("numeric", "$1,000", "It is 1000.00 in all", ("correct", "1000")),
        ("numeric", "18", "It is 19", ("wrong", "19")),
        ("numeric", "18", "I do not know", ("wrong", "")),
        ("regex", r"\b4[0-9]\b", "It is 42.", ("correct", "42")),
        ("regex", "^no$", "yes", ("wrong", "")),
        ("regex", "[[a]b", "ab", ("correct", "ab")),  # of which Python warns
        ("choice", "B", "Answer: B", ("correct", "B")),
        ("choice", "B", "Answer: A", ("wrong", "A")),
        ("choice", "B", "neither", ("wrong", "")),
        (None, "", "anything", ("unjudged", "")),
    ],
)
def test_rules(score, answer, content, found):
    assert judged(score, answer, content) == found


def test_what_was_cut_is_neither_right_nor_wrong():
    assert judged("exact", "Rome", "Rome", finish="length") == ("cut", "")
    assert judged(None, "", "Rome", finish="length") == ("cut", "")


def test_calls_are_values_not_texts():
    item = EvalItem("1", [], "exact", CALLS)
    assert judge(item, reply("", "tool_calls", [CALL])).ruling == "correct"
    assert judge(item, reply("I call.", "tool_calls", [CALL])).ruling == "wrong"
    assert judge(item, reply("", "tool_calls", [CALL, CALL])).ruling == "wrong"
    assert judge(item, reply("f")).ruling == "wrong"
    for text in ("{", "[" * 10**5):
        broken = {"function": {"name": "f", "arguments": text}}
        assert judge(item, reply("", "tool_calls", [broken])).note == "the arguments are not JSON"
    assert judged("exact", "Rome", "Rome", calls=[CALL]) == ("wrong", "Rome")


def test_a_pattern_that_would_never_end_is_given_up(monkeypatch):
    monkeypatch.setattr(judging, "PATTERN_SECONDS", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    found = judge(EvalItem("1", [], "regex", "(a+)+$"), reply("a" * 60 + "!"))
    assert (found.ruling, found.note) == ("wrong", judging.TOO_LONG)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
