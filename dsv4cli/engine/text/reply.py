"""Parsing of generated text into reasoning, content and tool calls, for a complete text or while it is generated."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.plain_text import open_tail
from dsv4cli.engine.text.prompt_text import (
    CALLS_CLOSE,
    CALLS_OPEN,
    INVOKE_CLOSE,
    INVOKE_OPEN,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
    to_json,
)
from dsv4cli.errors import Dsv4Error

ToolCall = dict[str, Any]
Kind = Literal["reasoning", "content", "calls"]

# the official patterns; `$` also matches before a final newline, which a call without parameters relies on
_NAME = re.compile(r'^\s*name="(.*?)">\n$', re.DOTALL)
_PARAMETER = re.compile(r'^ name="(.*?)" string="(true|false)">(.*?)<$', re.DOTALL)

# beginnings of markup, including malformed markup
_MARKUP = (f"<{tokens.DSML}", f"</{tokens.DSML}", tokens.DSML)

_FORBIDDEN = (tokens.BOS, tokens.EOS, tokens.THINK_START, tokens.THINK_END, tokens.DSML)


class MalformedReply(Dsv4Error):
    """The model's text does not follow the reply format."""


@dataclass(frozen=True)
class ParsedReply:
    """One assistant turn. Its calls are in OpenAI's shape without ids; arguments are JSON text, perhaps invalid."""

    content: str
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def changed(self, change: Callable[[str], str]) -> "ParsedReply":
        """Return a copy with `change` applied to each text."""
        calls = [
            {**call, "function": {key: change(text) for key, text in call["function"].items()}}
            for call in self.tool_calls
        ]
        return ParsedReply(change(self.content), change(self.reasoning_content), calls)

    def as_message(self) -> dict[str, Any]:
        """Return the reply as a message of the conversation."""
        return {
            "role": "assistant",
            "content": self.content,
            "reasoning_content": self.reasoning_content,
            "tool_calls": self.tool_calls,
        }


def name_calls(message: dict[str, Any], index: int) -> None:
    """Add ids to the calls of a message, so that tool results can refer to them.

    Args:
        index: the message's position in the conversation.
    """
    for nth, call in enumerate(message.get("tool_calls") or ()):
        call.setdefault("id", f"call_{index}_{nth}")


def parse_reply(text: str, *, thinking: bool) -> ParsedReply:
    """Parse a complete generation, including EOS, as the official parser does.

    Raises:
        MalformedReply: the text does not follow the reply format.
    """
    reader = _Reader(text)
    reasoning = ""
    if thinking:
        reasoning, mark = reader.until(CALLS_OPEN, tokens.THINK_END)
        if mark == CALLS_OPEN:
            raise MalformedReply(f"tool calls come before {tokens.THINK_END}")
    content, mark = reader.until(CALLS_OPEN, tokens.EOS)
    calls = _read_calls(reader) if mark == CALLS_OPEN else []
    if reader.rest and not (mark == CALLS_OPEN and reader.rest == tokens.EOS):
        raise MalformedReply(f"text follows the end of the reply: {excerpt(reader.rest)}")
    for part, name in ((reasoning, "reasoning"), (content, "content")):
        for token in _FORBIDDEN:
            if token in part:
                raise MalformedReply(f"the {name} contains the token {token}")
    return ParsedReply(content, reasoning, calls)


def split_reply(text: str, *, thinking: bool) -> ParsedReply:
    """Split a generation that was cut off. Text before the first `</think>` is reasoning; calls stay in the content."""
    text = text.removesuffix(tokens.EOS)
    if not thinking:
        return ParsedReply(text)
    reasoning, _, content = text.partition(tokens.THINK_END)
    return ParsedReply(content, reasoning)


class ReplyStream:
    """Splits generated text into reasoning, content and calls, and returns each piece as soon as it is certain.

    Only an end of the text that may be the beginning of `</think>`, EOS or markup is held back. From the first DSML
    mark on, everything is of kind "calls", including the mark, whether it is well formed or not. Within reasoning this
    ends at `</think>`. Neither `</think>` nor EOS is returned. The pieces of each kind join to the same text however
    the input is divided.
    """

    def __init__(self, thinking: bool) -> None:
        self._kind: Kind = "reasoning" if thinking else "content"
        self._thinking = thinking
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the reasoning has not ended, that is, `</think>` has not been read."""
        return self._thinking

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """Return the pieces that `text` makes certain, in order and without empty ones."""
        pieces: list[tuple[Kind, str]] = []
        self._held += text
        while found := self._next_mark():
            at, mark = found
            pieces.append((self._kind, self._held[:at]))
            if tokens.DSML in mark:
                self._held = self._held[at:]
                self._kind = "calls"
                continue
            self._held = self._held[at + len(mark) :]
            if mark == tokens.THINK_END:
                self._kind, self._thinking = "content", False
        certain = len(self._held) - open_tail(self._held, self._marks())
        pieces.append((self._kind, self._held[:certain]))
        self._held = self._held[certain:]
        return [piece for piece in pieces if piece[1]]

    def flush(self) -> list[tuple[Kind, str]]:
        """Return the text that was held back, because no more text follows."""
        held, self._held = self._held, ""
        return [(self._kind, held)] if held else []

    def _marks(self) -> tuple[str, ...]:
        """Return the texts that can end the current kind of text."""
        think = (tokens.THINK_END,) if self._thinking else ()
        # the empty line before calls is part of the markup after content, and part of the text after reasoning
        markup = {"reasoning": _MARKUP, "content": (f"\n\n{_MARKUP[0]}", *_MARKUP), "calls": ()}
        return (tokens.EOS, *think, *markup[self._kind])

    def _next_mark(self) -> tuple[int, str] | None:
        found = ((self._held.find(mark), mark) for mark in self._marks())
        return min((hit for hit in found if hit[0] >= 0), default=None)


class _Reader:
    """A position in a text, which advances from mark to mark."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def rest(self) -> str:
        """The text after the position."""
        return self._text[self._at :]

    def until(self, *marks: str) -> tuple[str, str]:
        """Advance past the nearest of the marks. Return the text before it, and the mark.

        Raises:
            MalformedReply: none of the marks follows; the error names the last one.
        """
        hits = ((self._text.find(mark, self._at), mark) for mark in marks)
        at, mark = min((hit for hit in hits if hit[0] >= 0), default=(-1, ""))
        if not mark:
            raise MalformedReply(f"the reply ends without {marks[-1]}")
        start, self._at = self._at, at + len(mark)
        return self._text[start:at], mark


def _read_calls(reader: _Reader) -> list[ToolCall]:
    """Read the calls up to the end of the block, from the position after its opening mark, before `>`.

    As in the official parser, the text may also end with that mark, or with the mark that closes a call.
    """
    calls: list[ToolCall] = []
    while reader.rest:
        between, mark = reader.until(INVOKE_OPEN, CALLS_CLOSE)
        if between != ">\n":
            raise MalformedReply(f"a tag of the tool calls does not end its line: {excerpt(between)}")
        if mark == CALLS_CLOSE:
            break
        calls.append(_read_invoke(reader))
    return calls


def _read_invoke(reader: _Reader) -> ToolCall:
    head, mark = reader.until(PARAMETER_OPEN, INVOKE_CLOSE)
    named = _NAME.match(head)
    if named is None:
        raise MalformedReply(f"a tool call has no name: {excerpt(head)}")
    name = named[1]
    arguments: dict[str, str] = {}
    while mark == PARAMETER_OPEN:
        key, value = _read_parameter(reader, name)
        if key in arguments:
            raise MalformedReply(f"the call of {name} has the parameter {key} twice")
        arguments[key] = value
        between, mark = reader.until(PARAMETER_OPEN, INVOKE_CLOSE)
        if between != ">\n":
            raise MalformedReply(f"a parameter of {name} does not end its line: {excerpt(between)}")
    text = ", ".join(f"{to_json(key)}: {value}" for key, value in arguments.items())
    return {"type": "function", "function": {"name": name, "arguments": f"{{{text}}}"}}


def _read_parameter(reader: _Reader, call: str) -> tuple[str, str]:
    """Return a parameter's name and its value as JSON text. A value that is declared as JSON is not checked."""
    text, _ = reader.until(PARAMETER_CLOSE)
    parts = _PARAMETER.match(text)
    if parts is None:
        raise MalformedReply(f"a parameter of {call} is not a name, its type and a closed value: {excerpt(text)}")
    key, is_text, value = parts.groups()
    return key, to_json(value) if is_text == "true" else value


def excerpt(text: str) -> str:
    """Return the beginning of a text, quoted, for an error."""
    return to_json(text if len(text) <= 60 else text[:60] + "...")
