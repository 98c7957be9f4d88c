"""Input files of `run`: conversations, prompts and texts to score, checked before a model is loaded; no torch."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dsv4cli.engine.text.prompt import Message, check_messages, check_tools, with_tools
from dsv4cli.errors import UsageError

T = TypeVar("T")
BYTE_ORDER_MARK = "\ufeff"
_SURROGATE_ESCAPE, _SURROGATE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
STDIN = Path("-")
_LINES = "write one JSON object on each line"


@dataclass(frozen=True)
class ScoreItem:
    """A line to score: exactly one of token ids, raw text and a conversation."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[Message] | None = None


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used, counted from 1, and why not."""

    number: int
    error: UsageError


def name_of(path: Path) -> str:
    """What to call a file; - is stdin."""
    return "stdin" if path == STDIN else str(path)


def read_text(path: Path) -> str:
    """The text of a file, or of stdin for -, as `decoded` gives it. Raises UsageError."""
    return decoded(read_content(path), name_of(path))


def read_content(path: Path) -> bytes:
    """The bytes of a file, or of stdin for -. Raises UsageError when it cannot be read."""
    try:
        if path != STDIN:
            return path.read_bytes()
        return b"" if sys.stdin is None else sys.stdin.buffer.read()
    except OSError as error:
        reason = f"{name_of(path)} cannot be read: {error.strerror}"
        raise UsageError(reason, "give the path of a readable file") from None


def decoded(content: bytes, name: str) -> str:
    """Bytes of UTF-8 as text, without the mark that Windows' editors begin it with; name: where they come from. Raises
    UsageError for another encoding."""
    try:
        return content.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        where = f"byte {content[error.start]:#04x} at offset {error.start}"
        raise UsageError(f"{name} is not UTF-8: {where}", "convert it to UTF-8") from None


def read_messages(path: Path) -> list[Message]:
    """The conversation in a JSON file, as `parse_messages` takes it."""
    return parse_messages(read_text(path), name_of(path))


def parse_messages(text: str, name: str) -> list[Message]:
    """The conversation in a text of JSON: a list of messages, or an object with `messages` and perhaps `tools`; name:
    where it comes from. Raises UsageError."""
    try:
        return _conversation(parse_json(text, "write a list of messages as for the OpenAI chat API"))
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.remedy) from None


def asked_in(value: dict[str, Any], system: str | None) -> list[Message]:
    """The conversation of a line, {"prompt": text} or {"messages": [...], "tools": [...]}. Raises UsageError."""
    if "messages" in value and system is not None:
        raise UsageError('"messages" and --system cannot be combined', "put the system message into the line")
    if "messages" in value:
        return _conversation(value)
    _check_key(value, ("prompt", "messages"), '{"prompt": "..."} or {"messages": [...]}')
    return from_prompt(_check_text(value, "prompt"), system)


def read_scores(path: Path) -> list[ScoreItem]:
    """The lines of a JSON-lines file to score, each {"ids": [...]}, {"text": "..."} or {"messages": [...]}."""

    items, bad = read_lines(path, scored_in)
    refuse(path, bad)
    return [item for _, item in items]


def scored_in(value: dict[str, Any]) -> ScoreItem:
    """What a line is to score: {"ids": [...]}, {"text": "..."} or {"messages": [...]}. Raises UsageError."""
    if "messages" in value:
        return ScoreItem(messages=_conversation(value))
    _check_key(value, ("ids", "text", "messages"), '{"ids": [...]}, {"text": "..."} or {"messages": [...]}')
    if "text" in value:
        return ScoreItem(text=_check_text(value, "text"))
    ids = value["ids"]
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise UsageError('"ids" is not a list of whole numbers, or is empty', "give at least one token id")
    return ScoreItem(ids=ids)


def from_prompt(prompt: str, system: str | None) -> list[Message]:
    """A conversation of one user message, after the system message if there is one."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def _conversation(value: object) -> list[Message]:
    if not isinstance(value, dict):
        return check_messages(value)
    unknown = set(value) - {"messages", "tools"}
    if unknown or "messages" not in value:
        what = f"unknown key {min(unknown)!r}" if unknown else 'there is no "messages"'
        raise UsageError(what, 'write {"messages": [...], "tools": [...]}')
    messages = check_messages(value["messages"])
    return messages if value.get("tools") is None else with_tools(messages, check_tools(value["tools"]))


def _check_key(value: dict[str, Any], allowed: Sequence[str], form: str) -> None:
    """Raises UsageError unless there is exactly one of the allowed keys and nothing else."""
    unknown = set(value) - set(allowed)
    if unknown or len(value) != 1:
        count = "more than one" if value else "none"
        raise UsageError(
            f"unknown key {min(unknown)!r}" if unknown else f"{count} of the keys {', '.join(allowed)}", f"write {form}"
        )


def _check_text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text:
        raise UsageError(f'"{key}" is {"empty" if text == "" else "not a text"}', "give a text")
    return text


def read_lines(path: Path, convert: Callable[[dict[str, Any]], T]) -> tuple[list[tuple[int, T]], list[BadLine]]:
    """Each non-empty line of a JSON-lines file, converted, with its number, and those that cannot be.

    Raises UsageError without any line.
    """
    return parse_lines(read_text(path), name_of(path), convert)


def parse_lines(
    text: str, name: str, convert: Callable[[dict[str, Any]], T]
) -> tuple[list[tuple[int, T]], list[BadLine]]:
    """The same of a text that has been read, from the file or stdin of this name."""
    good: list[tuple[int, T]] = []
    bad: list[BadLine] = []
    # not splitlines: a text inside a line may have U+2028 and its like
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                good.append((number, convert(_object(line))))
            except UsageError as error:
                bad.append(BadLine(number, error))
    if not good and not bad:
        raise UsageError(f"{name} has no lines", _LINES)
    return good, bad


def refuse(path: Path, bad: Sequence[BadLine], otherwise: str = "") -> None:
    """Raises UsageError that names all bad lines, if there are any; otherwise: what else can be done."""
    if not bad:
        return
    bad = sorted(bad, key=lambda one: one.number)
    if len(bad) == 1:
        error = bad[0].error
        raise UsageError(f"{name_of(path)}, line {bad[0].number}: {error.message}", error.remedy + otherwise)
    listed = [f"line {one.number}: {one.error.message}" for one in bad]
    raise UsageError(f"{name_of(path)} has {len(bad):,} bad lines", f"correct them{otherwise}", listed)


def _object(line: str) -> dict[str, Any]:
    value = parse_json(line, _LINES)
    if not isinstance(value, dict):
        raise UsageError("not a JSON object", _LINES)
    return value


def parse_json(text: str, remedy: str) -> object:
    """The JSON value of a text. Raises UsageError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise UsageError(f"not JSON: {error.msg} ({line}column {error.colno})", remedy) from None
    except (ValueError, RecursionError):  # an integer of thousands of digits, thousands of brackets
        raise UsageError("not JSON that can be read: a number too long, or nested too deeply", remedy) from None
    if _SURROGATE_ESCAPE.search(text) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise UsageError(
            "not Unicode: a \\u escape is half of a surrogate pair", "write both halves, or the character itself"
        )
    return value
