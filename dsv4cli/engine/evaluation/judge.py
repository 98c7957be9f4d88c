"""Judge whether an answer is correct, by the rule that its item names. No torch."""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from dsv4cli.engine.evaluation.extract import boxed, choice_in, compiled, number_in, number_of, same_formula
from dsv4cli.engine.evaluation.items import EvalItem

# cut: the answer reached its token limit, so it counts as neither correct nor wrong
Ruling = Literal["correct", "wrong", "cut", "unjudged"]
# version of the judging rules; results judged by different versions are not comparable
RULES = 2
# limit of a pattern on one answer, in seconds: backtracking can take exponential time
PATTERN_SECONDS = 1.0
TOO_LONG = f"the pattern took longer than {PATTERN_SECONDS:g} s and was stopped"


@dataclass(frozen=True)
class Judged:
    """The ruling on an answer.

    Attributes:
        given: what was taken as the answer; "" if nothing was found.
        note: what went wrong in judging.
    """

    ruling: Ruling
    given: str
    note: str = ""


def judge(item: EvalItem, reply: Mapping[str, Any]) -> Judged:
    """Judge a reply. Its reasoning is ignored.

    Call it in the main thread only: a signal stops a pattern that takes too long.

    Args:
        reply: has `content`, `tool_calls` and `finish_reason`, as `Answer.record` returns them.
    """
    content: str = reply["content"] or ""
    if reply["finish_reason"] == "length":
        return Judged("cut", "")
    if item.score is None:
        return Judged("unjudged", "")
    if isinstance(item.answer, list):
        return _judge_calls(item.answer, content, reply["tool_calls"])
    right, given, note = _RULES[item.score](item, item.answer, content)
    return Judged("correct" if right and not reply["tool_calls"] else "wrong", given, note)


def _judge_calls(expected: list[dict[str, Any]], content: str, calls: Sequence[Mapping[str, Any]]) -> Judged:
    """Judge tool calls: names and arguments must be equal as JSON values, and there must be no text besides them."""
    given = "\n".join(f"{call['function']['name']}({call['function']['arguments']})" for call in calls)
    try:
        made = [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])} for call in calls
        ]
    except (ValueError, RecursionError):
        return Judged("wrong", given, "the arguments are not JSON")
    return Judged("correct" if made == expected and not content.strip() else "wrong", given or content.strip())


# (correct, given, note), as in `Judged`
_Found = tuple[bool, str, str]


def _exact(item: EvalItem, expected: str, content: str) -> _Found:
    box = boxed(content)
    if box is not None:
        return same_formula(box, boxed(expected) or expected), box, ""
    return content.strip() == expected.strip(), content.strip(), ""


def _numeric(item: EvalItem, expected: str, content: str) -> _Found:
    number = number_in(content)
    return number is not None and number == number_of(expected), "" if number is None else str(number), ""


def _regex(item: EvalItem, expected: str, content: str) -> _Found:
    try:
        with _at_most(PATTERN_SECONDS):
            found = compiled(expected).search(content)
    except TimeoutError:
        return False, "", TOO_LONG
    return found is not None, found[0] if found else "", ""


def _choice(item: EvalItem, expected: str, content: str) -> _Found:
    named = choice_in(content, item.choices)
    return named is not None and item.choices[named] == expected, "" if named is None else item.choices[named], ""


# "continuation" is missing: continuations are scored, never generated
_RULES = {"exact": _exact, "numeric": _numeric, "regex": _regex, "choice": _choice}


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this time, also inside `re`, which checks for signals as it searches."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
