"""Input files of `dsv4 run`: conversations, prompts and texts to score, validated before the model loads. No torch."""

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
    """A line to score: either token ids, a raw text or a conversation."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[Message] | None = None


@dataclass(frozen=True)
class BadLine:
    """An invalid line, with its number counted from 1, and the error."""

    number: int
    error: UsageError


def name_of(path: Path) -> str:
    """Return the name of a file for messages; `-` is stdin."""
    return "stdin" if path == STDIN else str(path)


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a file, or of stdin for `-`. Raises UsageError if it cannot be read or decoded."""
    return decoded(read_content(path), name_of(path))


def read_content(path: Path) -> bytes:
    """Return the bytes of a file, or of stdin for `-`. Raises UsageError if it cannot be read."""
    try:
        if path != STDIN:
            return path.read_bytes()
        return b"" if sys.stdin is None else sys.stdin.buffer.read()
    except OSError as error:
        reason = f"{name_of(path)} cannot be read: {error.strerror}"
        raise UsageError(reason, "use the path of a readable file") from None


def decoded(content: bytes, name: str) -> str:
    """Decode UTF-8 bytes, without the byte order mark that Windows editors write.

    Args:
        name: the source of the bytes, for errors.

    Raises:
        UsageError: the bytes are not UTF-8.
    """
    try:
        return content.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        where = f"byte {content[error.start]:#04x} at offset {error.start}"
        raise UsageError(f"{name} is not UTF-8: {where}", "convert it to UTF-8") from None


def read_messages(path: Path) -> list[Message]:
    """Return the conversation in a JSON file, as `parse_messages` does."""
    return parse_messages(read_text(path), name_of(path))


def parse_messages(text: str, name: str) -> list[Message]:
    """Parse a conversation from JSON: a list of messages, or an object with `messages` and optional `tools`.

    Args:
        name: the source of the text, for errors.

    Raises:
        UsageError: the text is not JSON, or a message or tool is invalid.
    """
    try:
        return _conversation(parse_json(text, "write a list of messages as for the OpenAI chat API"))
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.remedy) from None


def asked_in(value: dict[str, Any], system: str | None) -> list[Message]:
    """Return the conversation of a line, {"prompt": text} or {"messages": [...], "tools": [...]}. Raises UsageError."""
    if "messages" in value and system is not None:
        raise UsageError('"messages" and --system cannot be combined', "put the system message into the line")
    if "messages" in value:
        return _conversation(value)
    _check_key(value, ("prompt", "messages"), '{"prompt": "..."} or {"messages": [...]}')
    return from_prompt(_check_text(value, "prompt"), system)


def read_scores(path: Path) -> list[ScoreItem]:
    """Return the items of a JSON-lines file to score: {"ids": [...]}, {"text": "..."} or {"messages": [...]} per line.

    Raises:
        UsageError: the file cannot be read, or a line is invalid.
    """

    items, bad = read_lines(path, scored_in)
    refuse(path, bad)
    return [item for _, item in items]


def scored_in(value: dict[str, Any]) -> ScoreItem:
    """Return the item of a line to score: {"ids": [...]}, {"text": "..."} or {"messages": [...]}. Raises UsageError."""
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
    """Return a conversation of one user message, preceded by the system message if there is one."""
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
    """Raise UsageError unless the object has exactly one of the allowed keys and no other key."""
    unknown = set(value) - set(allowed)
    if unknown or len(value) != 1:
        count = "more than one" if value else "none"
        raise UsageError(
            f"unknown key {min(unknown)!r}" if unknown else f"{count} of the keys {', '.join(allowed)}", f"write {form}"
        )


def _check_text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text:
        raise UsageError(f'"{key}" is {"empty" if text == "" else "not a string"}', "give a string")
    return text


def read_lines(path: Path, convert: Callable[[dict[str, Any]], T]) -> tuple[list[tuple[int, T]], list[BadLine]]:
    """Return the converted non-empty lines of a JSON-lines file with their numbers, and the invalid lines.

    Raises:
        UsageError: the file cannot be read or has no lines.
    """
    return parse_lines(read_text(path), name_of(path), convert)


def parse_lines(
    text: str, name: str, convert: Callable[[dict[str, Any]], T]
) -> tuple[list[tuple[int, T]], list[BadLine]]:
    """Return the converted lines of a text and its invalid lines, as `read_lines` does.

    Args:
        name: the source of the text, for errors.
    """
    good: list[tuple[int, T]] = []
    bad: list[BadLine] = []
    # not splitlines: a string inside a line may contain U+2028 and similar characters
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
    """Raise UsageError that lists all invalid lines, if there are any.

    Args:
        otherwise: an alternative remedy, appended to the error's remedy.
    """
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
    """Return the JSON value of a text. Raises UsageError if it is not JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise UsageError(f"not JSON: {error.msg} ({line}column {error.colno})", remedy) from None
    except (ValueError, RecursionError):  # integers with thousands of digits, or thousands of nested brackets
        raise UsageError("not JSON that can be read: a number too long, or nested too deeply", remedy) from None
    if _SURROGATE_ESCAPE.search(text) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise UsageError(
            "not Unicode: a \\u escape is half of a surrogate pair", "write both halves, or the character itself"
        )
    return value
