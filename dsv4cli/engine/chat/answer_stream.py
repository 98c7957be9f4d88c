"""An answer as a client of a server gets it: what is added to its reasoning, its content and its calls; no torch.

Nothing is taken back: what is given joins to the message at the end. Special tokens and markup are never given.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4cli.engine.chat.answer import Answer, FinishReason
from dsv4cli.engine.text.call_stream import CallDelta, CallStream
from dsv4cli.engine.text.lookalikes import unmarked
from dsv4cli.engine.text.markup import MarkupStream
from dsv4cli.engine.text.plain_text import PlainPart
from dsv4cli.engine.text.prompt import Message
from dsv4cli.engine.text.reply import Kind
from dsv4cli.engine.text.tokens import DSML
from dsv4cli.engine.text.wrapped_arguments import declared_by

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
    answer ended within it: the message lacks it, and its arguments are not whole; else None. repairs: at the end, what
    was repaired or left out, in words."""

    def __init__(self, answer: Answer, *, calls: bool = True) -> None:
        """calls: whether the answer may have some; else their markup is left out."""
        self.answer = answer
        self.open_call: int | None = None
        self.repairs: list[str] = []
        self._calls = CallStream(declared_by(answer.tools)) if calls else None
        self._markup: MarkupStream | None = MarkupStream()  # None: nothing more is certain before the end
        self._texts: dict[Kind, PlainPart] = {"reasoning": PlainPart(), "content": PlainPart()}
        self._given: dict[Kind, int] = {"reasoning": 0, "content": 0}  # characters
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
        reasons = self.answer.in_reasoning
        pieces = self.answer.read(token)
        deltas = [] if self._over else self._added(pieces, reasons)
        # nothing that follows is the message's, where the answer was to go on behind its end
        self._over |= token.id == self.answer.tokenizer.eos_id
        return deltas + (self._rest() if self.answer.finish else [])

    def cut(self) -> list[Delta]:
        """Ends an answer that was interrupted: what was held back; harmless when it has ended."""
        if self.answer.finish:
            return []
        return self._added(self.answer.read_rest(), self.answer.in_reasoning) + self._rest()

    def message(self) -> Message:
        """The whole answer, once it has ended or was cut."""
        if self._message is None:
            self._message, self.repairs = self.answer.message()
            if self._calls is None:
                self._message["tool_calls"] = []
        return self._message

    def _added(self, pieces: Iterable[tuple[Kind, str]], reasons: bool) -> list[Delta]:
        """What pieces add; reasons: whether the reasoning had not ended before them."""
        deltas: list[Delta] = []
        for kind, text in self._split(pieces, reasons):
            last, self._last = self._last, kind
            # what ends a text is certain where content follows, or calls that begin as they should
            regular = kind == "calls" and text.startswith("\n\n")
            if last == "reasoning" and (kind == "content" or regular):
                deltas += self._give("reasoning", self._texts["reasoning"].flush())
            elif last == "content" and regular:
                deltas += self._give("content", self._texts["content"].settle())
            elif last == "calls" and kind == "content":  # in the thinking: what stands before them is its end
                deltas += self._give("reasoning", self._texts["reasoning"].flush().rstrip())
            if kind in self._texts:
                deltas += self._give(kind, self._texts[kind].push(text))
            elif self._calls is not None:
                deltas += _of_calls(self._calls.push(text))
        return deltas

    def _split(self, pieces: Iterable[tuple[Kind, str]], reasons: bool) -> Iterator[tuple[Kind, str]]:
        """The pieces with the text that stands around markup as content. Markup in the reasoning counts at the end."""
        for kind, text in pieces:
            if kind == "reasoning":
                yield kind, text
                continue
            # in the reasoning, an empty line does not belong to markup
            regular = text.startswith(f"\n\n<{DSML}") and self._last != "calls"
            reasons = reasons and kind == "calls" and not regular
            if reasons:
                self._last = "calls"
                if not self.answer.in_reasoning:  # part of it may stand behind the reasoning
                    self._markup = None
            elif self._markup is not None:
                yield from self._markup.push(text)

    def _rest(self) -> list[Delta]:
        """What the message has beyond what was given."""
        message = self.message()
        deltas = self._give("reasoning", message["reasoning_content"][self._given["reasoning"] :])
        deltas += self._give("content", message["content"][self._given["content"] :])
        if self._calls is not None:
            deltas += _of_calls(self._calls.finish(message["tool_calls"]))
            self.open_call = self._calls.open_call
        return deltas

    def _give(self, kind: Kind, text: str) -> list[Delta]:
        text = unmarked(text)
        self._given[kind] += len(text)
        return [Delta(kind, text)] if text else []


def _of_calls(deltas: Iterable[CallDelta]) -> list[Delta]:
    return [Delta("calls", one.arguments, one.index, one.name) for one in deltas]
