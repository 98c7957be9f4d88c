"""Evaluation items: what a model is asked and what counts as correct; reads the JSON lines of our format. No torch."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, get_args

from dsv4cli.engine.evaluation.extract import compiled
from dsv4cli.engine.evaluation.number_text import number_of
from dsv4cli.engine.text.inputs import BadLine, asked_in, parse_lines
from dsv4cli.engine.text.prompt import Message
from dsv4cli.errors import UsageError

Scoring = Literal["exact", "numeric", "regex", "choice", "continuation"]
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)
_KEYS = {"id", "task", "prompt", "messages", "tools", "think", "score", "answer", "choices"}


@dataclass(frozen=True)
class EvalItem:
    """A question of an evaluation and how to judge the answer.

    Attributes:
        score: how the answer is judged; None to record it without judging.
        answer: the correct answer: a text, the text of one of the `choices`, a pattern or a continuation. For tool
            calls, a list of {"name", "arguments"}.
        tokens: the bytes of each token, for a continuation that is given as tokens.
        think: whether the model thinks before it answers; None for the setting of the command.
        task: results are also summarized per task.
    """

    id: str
    messages: list[Message]
    score: Scoring | None = None
    answer: str | list[dict[str, Any]] = ""
    choices: tuple[str, ...] = ()
    tokens: tuple[bytes, ...] = ()
    think: bool | None = None
    task: str = ""


@dataclass(frozen=True)
class EvalSet:
    """The items of a question file, with its name and its format."""

    name: str
    form: str
    items: list[EvalItem]

    def first(self, count: int | None) -> "EvalSet":
        """Return a set of the first `count` items; None for all of them."""
        return self if count is None else replace(self, items=self.items[:count])

    @cached_property
    def digest(self) -> str:
        """Hash of the items, to tell this set from others."""
        content = json.dumps([asdict(one) for one in self.items], sort_keys=True, default=bytes.hex)
        return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:16]


def read_own(text: str, name: str) -> tuple[list[tuple[int, EvalItem]], list[BadLine]]:
    """Read JSON lines {"id", "prompt" or "messages", "answer", "score", "choices", "think", "task"}.

    Returns:
        The items with their line numbers, and the bad lines.
    """
    return parse_lines(text, name, _item)


def numbered(lines: list[tuple[int, EvalItem]], bad: list[BadLine]) -> list[EvalItem]:
    """Return the items, each with an id (by default its line number). Lines with a duplicate id are added to `bad`."""
    seen: dict[str, int] = {}
    items = []
    for number, item in lines:
        id_ = item.id or str(number)
        if id_ in seen:
            error = UsageError(f"the id {id_!r} is already used in line {seen[id_]}", "give each item a unique id")
            bad.append(BadLine(number, error))
        seen.setdefault(id_, number)
        items.append(replace(item, id=id_))
    return items


def _item(value: dict[str, Any]) -> EvalItem:
    unknown = set(value) - _KEYS
    if unknown:
        raise UsageError(f"unknown key {min(unknown)!r}", f"use {', '.join(sorted(_KEYS))}")
    asked = {key: value[key] for key in ("prompt", "messages", "tools") if value.get(key) is not None}
    messages = asked_in(asked, None)
    think, score = value.get("think"), value.get("score")
    if think is not None and not isinstance(think, bool):
        raise UsageError('"think" is neither true nor false', "use one of them, or remove it")
    common = EvalItem(_word(value, "id"), messages, think=think, task=_word(value, "task"))
    if score is None:
        for key in ("answer", "choices"):
            if value.get(key) is not None:
                raise UsageError(f'"{key}" without "score"', f'add "score": one of {", ".join(SCORINGS)}')
        return common
    if score not in SCORINGS:
        raise UsageError(f'"score" cannot be {score!r}', f"use one of {', '.join(SCORINGS)}")
    if value.get("answer") is None:
        raise UsageError(f'"{score}" needs an "answer"', "add the correct answer")
    if score != "choice" and value.get("choices") is not None:
        raise UsageError(f'"choices" with the score "{score}"', 'use the score "choice", or remove them')
    return _READERS[score](common, value)


def _exact(item: EvalItem, value: dict[str, Any]) -> EvalItem:
    answer = value["answer"]
    if isinstance(answer, list):
        for call in answer:
            if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["name"], str):
                raise UsageError('"answer" is not a list of calls', 'write [{"name": …, "arguments": {…}}]')
        return replace(item, score="exact", answer=answer)
    return replace(item, score="exact", answer=_text(answer))


def _numeric(item: EvalItem, value: dict[str, Any]) -> EvalItem:
    answer = value["answer"]
    text = digits(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else _text(answer)
    if number_of(text) is None:
        raise UsageError(f'"answer" has no number: {text[:40]!r}', "write a number")
    return replace(item, score="numeric", answer=text)


def digits(number: float) -> str:
    """Format a number without an exponent: `0.00001` instead of `1e-05`, which `number_of` would read as 1."""
    return format(Decimal(repr(number)), "f") if isinstance(number, float) else str(number)


def _regex(item: EvalItem, value: dict[str, Any]) -> EvalItem:
    answer = _text(value["answer"])
    try:
        compiled(answer)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f'"answer" is not a pattern: {error}', "write it as for Python's re module") from None
    return replace(item, score="regex", answer=answer)


def _choice(item: EvalItem, value: dict[str, Any]) -> EvalItem:
    choices, answer = value.get("choices"), value["answer"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise UsageError('"choices" must be a list of at least two strings', "list the texts to choose from")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        answer = choices[answer]
    if answer not in choices:
        raise UsageError(
            '"answer" is neither one of the choices nor the index of one', "count from 0, or write the text"
        )
    return choose(item, tuple(choices), answer)


def choose(item: EvalItem, choices: tuple[str, ...], answer: str) -> EvalItem:
    """Return the item with these choices.

    Raises:
        UsageError: one choice is a prefix of another, which could then never be the likelier one.
    """
    for one in choices:
        if sum(other.startswith(one) for other in choices) > 1:
            raise UsageError(
                f"a choice begins with another choice, {one[:40]!r}", "end each with a period, or use letters"
            )
    return replace(item, score="choice", choices=choices, answer=answer)


def _continuation(item: EvalItem, value: dict[str, Any]) -> EvalItem:
    return replace(item, score="continuation", answer=_text(value["answer"]))


_READERS: Mapping[Scoring, Callable[[EvalItem, dict[str, Any]], EvalItem]] = {
    "exact": _exact,
    "numeric": _numeric,
    "regex": _regex,
    "choice": _choice,
    "continuation": _continuation,
}


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError('"answer" must be a non-empty string', "write the correct answer as a string")
    return value


def _word(value: dict[str, Any], key: str) -> str:
    word = value.get(key)
    if word is None:
        return ""
    if isinstance(word, bool) or not isinstance(word, str | int | float) or word == "":
        raise UsageError(f'"{key}" is neither a string nor a number', "use one of them, or remove it")
    return str(word)
