"""What the model wrote, taken apart: reasoning, content and tool calls, of a finished text or as it comes."""

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

# the official patterns; `$` also matches before a last newline, which the empty parameter list of a call needs
_NAME = re.compile(r'^\s*name="(.*?)">\n$', re.DOTALL)
_PARAMETER = re.compile(r'^ name="(.*?)" string="(true|false)">(.*?)<$', re.DOTALL)

# how markup can begin, the malformed included
_MARKUP = (f"<{tokens.DSML}", f"</{tokens.DSML}", tokens.DSML)

_FORBIDDEN = (tokens.BOS, tokens.EOS, tokens.THINK_START, tokens.THINK_END, tokens.DSML)


class MalformedReply(Dsv4Error):
    """The model's text does not follow the reply format."""


@dataclass(frozen=True)
class ParsedReply:
    """One assistant turn. The calls are in OpenAI shape, without ids; arguments are JSON text, perhaps invalid."""

    content: str
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def changed(self, change: Callable[[str], str]) -> "ParsedReply":
        """The same with each text changed."""
        calls = [
            {**call, "function": {key: change(text) for key, text in call["function"].items()}}
            for call in self.tool_calls
        ]
        return ParsedReply(change(self.content), change(self.reasoning_content), calls)

    def as_message(self) -> dict[str, Any]:
        """The reply as a message of the conversation."""
        return {
            "role": "assistant",
            "content": self.content,
            "reasoning_content": self.reasoning_content,
            "tool_calls": self.tool_calls,
        }


def name_calls(message: dict[str, Any], index: int) -> None:
    """Gives the calls of a message ids, for results to name; index: its number in the conversation."""
    for nth, call in enumerate(message.get("tool_calls") or ()):
        call.setdefault("id", f"call_{index}_{nth}")


def parse_reply(text: str, *, thinking: bool) -> ParsedReply:
    """A finished generation, EOS included, as the official parser reads it; MalformedReply says what is wrong."""
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
    """A generation that was cut off: what comes before the first `</think>` is reasoning, calls stay in the content."""
    text = text.removesuffix(tokens.EOS)
    if not thinking:
        return ParsedReply(text)
    reasoning, _, content = text.partition(tokens.THINK_END)
    return ParsedReply(content, reasoning)


class ReplyStream:
    """Reasoning, content and calls of a text that comes in pieces, each as soon as it is certain.

    Held back is only a tail that could be the beginning of `</think>`, of EOS or of markup. From the first mark of DSML
    on all is "calls", the mark included, well formed or not; in reasoning that lasts until `</think>`, which ends the
    reasoning and is not returned, nor is EOS. However the text is cut, the pieces of each kind join to the same text.
    """

    def __init__(self, thinking: bool) -> None:
        self._kind: Kind = "reasoning" if thinking else "content"
        self._thinking = thinking
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether `</think>` has not come yet."""
        return self._thinking

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """The pieces that `text` makes certain, in order and none empty."""
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
        """The tail that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return [(self._kind, held)] if held else []

    def _marks(self) -> tuple[str, ...]:
        """The texts that end something in what is being read."""
        think = (tokens.THINK_END,) if self._thinking else ()
        # no answer's text ends with the empty line before its calls; what stands before markup elsewhere is its own
        markup = {"reasoning": _MARKUP, "content": (f"\n\n{_MARKUP[0]}", *_MARKUP), "calls": ()}
        return (tokens.EOS, *think, *markup[self._kind])

    def _next_mark(self) -> tuple[int, str] | None:
        found = ((self._held.find(mark), mark) for mark in self._marks())
        return min((hit for hit in found if hit[0] >= 0), default=None)


class _Reader:
    """A position in a text that moves past one mark after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def rest(self) -> str:
        """What has not been read."""
        return self._text[self._at :]

    def until(self, *marks: str) -> tuple[str, str]:
        """The text before the nearest of the marks, and that mark; MalformedReply names the last if none comes."""
        hits = ((self._text.find(mark, self._at), mark) for mark in marks)
        at, mark = min((hit for hit in hits if hit[0] >= 0), default=(-1, ""))
        if not mark:
            raise MalformedReply(f"the reply ends without {marks[-1]}")
        start, self._at = self._at, at + len(mark)
        return self._text[start:at], mark


def _read_calls(reader: _Reader) -> list[ToolCall]:
    """The invokes up to the end of the block; the reader stands behind its opening mark, before `>`.

    As in the official parser, a text may also end with that mark, or with the one that closes an invoke.
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
    """A parameter's name and its value as JSON text; one that says it is JSON is taken at its word."""
    text, _ = reader.until(PARAMETER_CLOSE)
    parts = _PARAMETER.match(text)
    if parts is None:
        raise MalformedReply(f"a parameter of {call} is not a name, its type and a closed value: {excerpt(text)}")
    key, is_text, value = parts.groups()
    return key, to_json(value) if is_text == "true" else value


def excerpt(text: str) -> str:
    """Return the beginning of a text, quoted, for an error."""
    return to_json(text if len(text) <= 60 else text[:60] + "...")
