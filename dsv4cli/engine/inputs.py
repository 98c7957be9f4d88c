"""Input files of `run`: conversations, prompts and texts to score, checked before a model is loaded; no torch."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dsv4cli.engine.prompt import Message, check_messages, check_tools, with_tools
from dsv4cli.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class ScoreItem:
    """A line to score: exactly one of token ids, raw text and a conversation."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[Message] | None = None


def read_text(path: Path) -> str:
    """The text of a file. Raises UsageError when it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "give the path of a readable file") from None
    except UnicodeDecodeError as error:
        raise not_utf8(str(path), error) from None


def not_utf8(name: str, error: UnicodeDecodeError) -> UsageError:
    """What to say about input in another encoding."""
    return UsageError(
        f"{name} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}", "convert it to UTF-8"
    )


def read_messages(path: Path) -> list[Message]:
    """The conversation in a JSON file: a list of messages, or an object with `messages` and perhaps `tools`."""
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", "write a list of messages as in the OpenAI API") from None
    return _conversation(value, str(path))


def read_prompts(path: Path, system: str | None) -> list[list[Message]]:
    """The conversations of a JSON-lines file, each line {"prompt": text} or {"messages": [...], "tools": [...]}."""

    def parse(value: dict[str, Any]) -> list[Message]:
        if set(value) == {"prompt"} and isinstance(value["prompt"], str):
            return from_prompt(value["prompt"], system)
        if "messages" in value:
            return _conversation(value, "the line")
        raise UsageError('the line has neither "prompt" (a text) nor "messages" (a list)')

    return list(_lines(path, parse))


def read_scores(path: Path) -> list[ScoreItem]:
    """The lines of a JSON-lines file to score, each {"ids": [...]}, {"text": "..."} or {"messages": [...]}."""

    def parse(value: dict[str, Any]) -> ScoreItem:
        ids, text = value.get("ids"), value.get("text")
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            return ScoreItem(ids=ids)
        if isinstance(text, str) and text:
            return ScoreItem(text=text)
        if "messages" in value:
            return ScoreItem(messages=_conversation(value, "the line"))
        raise UsageError('the line has no "ids" (a list of integers), "text" or "messages"; none may be empty')

    return list(_lines(path, parse))


def from_prompt(prompt: str, system: str | None) -> list[Message]:
    """A conversation of one user message, after the system message if there is one."""
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def _conversation(value: object, where: str) -> list[Message]:
    if not isinstance(value, dict):
        return check_messages(value)
    unknown = set(value) - {"messages", "tools"}
    if unknown or "messages" not in value:
        what = f"has the unknown key {min(unknown)!r}" if unknown else 'has no "messages"'
        raise UsageError(f"{where} {what}", 'write {"messages": [...], "tools": [...]}')
    messages = check_messages(value["messages"])
    return with_tools(messages, check_tools(value["tools"])) if value.get("tools") else messages


def _lines(path: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Each non-empty line of a JSON-lines file, parsed; an error names the line. Raises UsageError without any line."""
    count = 0
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            count += 1
            yield _parse_line(f"{path}, line {number}", line, parse)
    if not count:
        raise UsageError(f"{path} has no lines", "write one JSON object on each line")


def _parse_line(where: str, line: str, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise UsageError("the line is not a JSON object")
        return parse(value)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}", "write one JSON object on each line") from None
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.remedy or "correct the line") from None
