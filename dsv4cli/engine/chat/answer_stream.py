"""An answer as a client of a server gets it: what is added to its reasoning, its content and its calls; no torch.

Nothing is taken back: what is given joins to the message at the end. Special tokens and markup are never given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv4cli.engine.chat.answer import Answer, FinishReason
from dsv4cli.engine.text.call_stream import CallDelta, CallStream
from dsv4cli.engine.text.lookalikes import unmarked
from dsv4cli.engine.text.plain_text import PlainText
from dsv4cli.engine.text.prompt import Message
from dsv4cli.engine.text.reply import Kind
from dsv4cli.engine.text.wrapped_arguments import declared_by, unwrapped

if TYPE_CHECKING:
    from dsv4cli.engine.runtime.request import Token


@dataclass(frozen=True)
class Delta:
    """What a token has added. text: of the reasoning, of the content, or of a call's arguments as JSON.

    index: which call, from 0. name: of its function, with its first delta and only there.
    """

    kind: Kind
    text: str
    index: int = -1
    name: str = ""


class AnswerStream:
    """Takes the tokens of one answer. open_call: at the end, the index of a call that was begun and is none, for the
    answer ended within it: the message lacks it, and its arguments are not whole; else None."""

    def __init__(self, answer: Answer, tools: Sequence[Mapping[str, Any]] = (), *, calls: bool = True) -> None:
        """tools: what the prompt has offered, in OpenAI's shape. calls: whether the answer may have some; else their
        markup is left out."""
        self.answer = answer
        self.open_call: int | None = None
        self._declared = declared_by(tools)
        self._calls = CallStream(self._declared) if calls else None
        self._texts: dict[Kind, _PlainPart] = {"reasoning": _PlainPart(), "content": _PlainPart()}
        self._last: Kind = "reasoning"
        self._over = False
        self._message: Message | None = None

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer ended, "tool_calls" where its message has some; None before, and where it was cut."""
        if self.answer.finish is None or self.answer.finish == "length":
            return self.answer.finish
        return "tool_calls" if self.message()["tool_calls"] else "stop"

    def push(self, token: "Token") -> list[Delta]:
        """What a token has added, with the last one also what was held back."""
        pieces = self.answer.read(token)
        deltas = [] if self._over else self._added(pieces)
        # nothing that follows is the message's, where the answer was to go on behind its end
        self._over |= token.id == self.answer.tokenizer.eos_id
        return deltas + (self._rest() if self.answer.finish else [])

    def cut(self) -> list[Delta]:
        """Ends an answer that was interrupted: what was held back; harmless when it has ended."""
        if self.answer.finish:
            return []
        return self._added(self.answer.read_rest()) + self._rest()

    def message(self) -> Message:
        """The whole answer, once it has ended or was cut."""
        if self._message is None:
            self._message, _ = self.answer.message()
            calls = [] if self._calls is None else self._message["tool_calls"]
            self._message["tool_calls"] = [unwrapped(call, self._declared) for call in calls]
        return self._message

    def _added(self, pieces: Iterable[tuple[Kind, str]]) -> list[Delta]:
        deltas: list[Delta] = []
        for kind, text in pieces:
            # what ends a text is certain where content follows, or calls that begin as they should
            if kind != self._last and self._last in self._texts and (kind == "content" or text.startswith("\n\n")):
                deltas += self._given(self._last, self._texts[self._last].flush())
            elif kind == "content" and self._last == "calls":  # in the thinking: what stands before them is its end
                deltas += self._given("reasoning", self._texts["reasoning"].flush().rstrip())
            self._last = kind
            if kind in self._texts:
                deltas += self._given(kind, self._texts[kind].push(text))
            elif self._calls is not None:
                deltas += _of_calls(self._calls.push(text))
        return deltas

    def _rest(self) -> list[Delta]:
        """What the message has beyond what was given."""
        message = self.message()
        deltas = self._given("reasoning", message["reasoning_content"][self._texts["reasoning"].given :])
        deltas += self._given("content", message["content"][self._texts["content"].given :])
        if self._calls is not None:
            deltas += _of_calls(self._calls.finish(message["tool_calls"]))
            self.open_call = self._calls.open_call
        return deltas

    def _given(self, kind: Kind, text: str) -> list[Delta]:
        text = unmarked(text)
        self._texts[kind].given += len(text)
        return [Delta(kind, text)] if text else []


class _PlainPart:
    """Reasoning or content without special tokens; spaces at its end are held, for markup may follow. given: how many
    characters were given."""

    def __init__(self) -> None:
        self.given = 0
        self._plain, self._spaces = PlainText(), ""

    def push(self, text: str) -> str:
        text = self._spaces + self._plain.push(text)
        certain = text.rstrip()
        self._spaces = text[len(certain) :]
        return certain

    def flush(self) -> str:
        text, self._spaces = self._spaces + self._plain.flush(), ""
        return text


def _of_calls(deltas: Iterable[CallDelta]) -> list[Delta]:
    return [Delta("calls", one.arguments, one.index, one.name) for one in deltas]
