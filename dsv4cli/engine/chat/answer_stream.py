"""An answer as a server streams it: deltas of reasoning, content and tool calls. Does not import torch.

Deltas are final: they join to exactly the message at the end. They never contain special tokens or markup.
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
    """An addition to an answer.

    Attributes:
        kind: reasoning, content or calls.
        text: added text of the reasoning, of the content, or of a call's arguments as JSON.
        index: the call, counted from 0; -1 if it is not a call.
        name: the function's name, only in the first delta of a call.
    """

    kind: Kind
    text: str
    index: int = -1
    name: str = ""


class AnswerStream:
    """Turns the tokens of one answer into deltas.

    Attributes:
        open_call: at the end, the index of a call that was started but is not part of the message, because the answer
            ended within it; None otherwise.
        repairs: at the end, descriptions of what was repaired or left out.
    """

    def __init__(self, answer: Answer, *, calls: bool = True) -> None:
        """Create the stream.

        Args:
            calls: whether the answer may contain tool calls. If not, their markup is removed.
        """
        self.answer = answer
        self.open_call: int | None = None
        self.repairs: list[str] = []
        self._calls = CallStream(declared_by(answer.tools)) if calls else None
        self._markup: MarkupStream | None = MarkupStream()  # None: nothing is certain until the end
        self._texts: dict[Kind, PlainPart] = {"reasoning": PlainPart(), "content": PlainPart()}
        self._given: dict[Kind, int] = {"reasoning": 0, "content": 0}  # characters returned
        self._last: Kind = "reasoning"
        self._over = False
        self._message: Message | None = None

    @property
    def finish(self) -> FinishReason | None:
        """The finish reason, "tool_calls" if the message has any; None before the end, and if the answer was cut."""
        if self.answer.finish is None or self.answer.finish == "length":
            return self.answer.finish
        return "tool_calls" if self.message()["tool_calls"] else "stop"

    def push(self, token: "Token") -> list[Delta]:
        """Add a token, and return its deltas. The last token also returns everything that was held back."""
        reasons = self.answer.in_reasoning
        pieces = self.answer.read(token)
        deltas = [] if self._over else self._added(pieces, reasons)
        # with ignore_eos the answer continues after its end token, but the message ends there
        self._over |= token.id == self.answer.tokenizer.eos_id
        return deltas + (self._rest() if self.answer.finish else [])

    def cut(self) -> list[Delta]:
        """End an interrupted answer, and return what was held back. Does nothing if it has ended."""
        if self.answer.finish:
            return []
        return self._added(self.answer.read_rest(), self.answer.in_reasoning) + self._rest()

    def message(self) -> Message:
        """Return the complete answer as a message. Call it only after the answer has ended or was cut."""
        if self._message is None:
            self._message, self.repairs = self.answer.message()
            if self._calls is None:
                self._message["tool_calls"] = []
        return self._message

    def _added(self, pieces: Iterable[tuple[Kind, str]], reasons: bool) -> list[Delta]:
        """Return the deltas of some pieces.

        Args:
            reasons: whether the answer was still reasoning before these pieces.
        """
        deltas: list[Delta] = []
        for kind, text in self._split(pieces, reasons):
            last, self._last = self._last, kind
            # held whitespace is certain if content or well-formed calls follow
            regular = kind == "calls" and text.startswith("\n\n")
            if last == "reasoning" and (kind == "content" or regular):
                deltas += self._give("reasoning", self._texts["reasoning"].flush())
            elif last == "content" and regular:
                deltas += self._give("content", self._texts["content"].settle())
            elif last == "calls" and kind == "content":  # calls inside the thinking: the text before them ended it
                deltas += self._give("reasoning", self._texts["reasoning"].flush().rstrip())
            if kind in self._texts:
                deltas += self._give(kind, self._texts[kind].push(text))
            elif self._calls is not None:
                deltas += _of_calls(self._calls.push(text))
        return deltas

    def _split(self, pieces: Iterable[tuple[Kind, str]], reasons: bool) -> Iterator[tuple[Kind, str]]:
        """Yield the pieces, with text around markup as content. Markup inside the reasoning is left for the end."""
        for kind, text in pieces:
            if kind == "reasoning":
                yield kind, text
                continue
            # after reasoning, an empty line is not part of the markup
            regular = text.startswith(f"\n\n<{DSML}") and self._last != "calls"
            reasons = reasons and kind == "calls" and not regular
            if reasons:
                self._last = "calls"
                if not self.answer.in_reasoning:  # a part of it may follow the reasoning
                    self._markup = None
            elif self._markup is not None:
                yield from self._markup.push(text)

    def _rest(self) -> list[Delta]:
        """Return the deltas that complete the message."""
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
