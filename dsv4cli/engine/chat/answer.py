"""One answer as it arrives: tokens to text, stop strings, reasoning apart from content; no torch."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dsv4cli.engine.chat.thinking import Closed
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.lookalikes import lookalikes, marked, unmarked
from dsv4cli.engine.text.prompt import Message, Tool
from dsv4cli.engine.text.repair import repair_reply
from dsv4cli.engine.text.reply import Kind, MalformedReply, ParsedReply, ReplyStream, parse_reply, split_reply
from dsv4cli.engine.text.tokenizer import StreamDecoder, Tokenizer
from dsv4cli.engine.text.wrapped_arguments import declared_by, required_by, unwrapped

if TYPE_CHECKING:
    from dsv4cli.engine.runtime.request import Token

# the text that one token made certain, by kind
Pieces = list[tuple[Kind, str]]
FinishReason = Literal["stop", "length", "tool_calls"]
# the tokens between reasoning, content and calls: a part of their text is nobody's
MARKS = (tokens.THINK_END, tokens.DSML)


@dataclass
class Answer:
    """Takes the tokens of one sequence; `push` returns the text that has become certain, by kind.

    finish is set with the last step, `complaint` too where the end token came and the strict parser refused the text.
    tools: what the prompt has offered, in OpenAI's shape. thoughts: how many tokens are reasoning.
    closed: why the thinking was ended from outside, by whoever did. stopped_by: the stop text that has ended it.
    """

    tokenizer: Tokenizer
    thinking: bool
    stops: Sequence[str] = ()
    tools: Sequence[Tool] = ()
    tokens: list["Token"] = field(default_factory=list)
    finish: FinishReason | None = None
    complaint: str = ""
    closed: Closed = ""
    stopped_by: str | None = None
    thoughts: int = 0

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer)
        self._stream = ReplyStream(self.thinking)
        self._text = ""  # everything decoded but the end token, cut at a stop string
        self._lookalikes: list[int] = []  # where it has text that looks like a special token: lookalikes.py
        self._marks: list[tuple[int, int]] = []  # where it has those of `MARKS`, as far as they were not sent
        self._sent = 0  # characters of it that went into the stream
        self._starts: list[int] = []  # how many characters it had before each token
        self._reply = ParsedReply("")

    @property
    def drawn(self) -> int:
        """How many tokens it has so far."""
        return len(self.tokens)

    @property
    def shown(self) -> int:
        """How many tokens are certain to be part of the text: those that begin before a stop string, which the last of
        them may contain the beginning of."""
        if self.finish and self.stopped_by is None:
            return self.drawn
        return bisect_left(self._starts, self._sent)

    @property
    def prepared(self) -> bool:
        """Whether the step of the newest token has prepared kernels."""
        return self.tokens[-1].prepared

    def push(self, token: "Token") -> Pieces:
        """Adds a token; sets `finish` when the answer ends with it."""
        return _unmarked(self.read(token))

    def read(self, token: "Token") -> list[tuple[Kind, str]]:
        """As `push`, with the marks of lookalikes.py in the text."""
        self.tokens.append(token)
        self._starts.append(len(self._text))
        ended = token.finish == "stop"
        special = self.tokenizer.special.get(token.id)
        # one that is no part of the format has no text
        if not ended and (special is None or special in tokens.SPECIAL):
            self._take(self._decoder.push(token.id), special or "")
        if token.finish:
            self._take(self._decoder.flush())
        self.finish = "stop" if self._cut_at_stop() else token.finish
        certain = len(self._text) if self.finish else len(self._text) - self._held_back()
        pieces = self._stream.push(self._marked(self._sent, certain))
        self._sent = certain
        self.thoughts += self.in_reasoning
        if self.finish:
            self._reply = self._parse() if ended else split_reply(self._whole, thinking=self.thinking)
            pieces += self._stream.flush()
        return pieces

    def cut(self) -> Pieces:
        """Ends an answer that was interrupted, without a `finish`; harmless when it has ended."""
        return _unmarked(self.read_rest())

    def read_rest(self) -> list[tuple[Kind, str]]:
        """As `cut`, with the marks of lookalikes.py in the text."""
        if self.finish:
            return []
        self._take(self._decoder.flush())
        pieces = self._stream.push(self._marked(self._sent, len(self._text))) + self._stream.flush()
        self._sent = len(self._text)
        self._reply = split_reply(self._whole, thinking=self.thinking)
        return pieces

    @property
    def in_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._stream.in_reasoning

    def message(self) -> tuple[Message, list[str]]:
        """An answer that has ended or was cut as a message, and what was repaired or left out for that, in words."""
        ended = bool(self.tokens) and self.tokens[-1].finish == "stop"
        text = self._whole + (tokens.EOS if ended else "")
        reply, repairs = repair_reply(text, thinking=self.thinking, required=required_by(self.tools))
        message, declared = reply.changed(unmarked).as_message(), declared_by(self.tools)
        message["tool_calls"] = [unwrapped(call, declared) for call in message["tool_calls"]]
        return message, [unmarked(words) for words in repairs]

    @property
    def _whole(self) -> str:
        return self._marked(0, len(self._text))

    def _marked(self, start: int, end: int) -> str:
        """A part of the text as its readers get it."""
        return marked(self._text, self._lookalikes, start, end)

    def _take(self, text: str, special: str = "") -> None:
        """Adds a text, that of a special token at its end or of others."""
        before = len(self._text)
        self._text += text
        if special:
            mark = [(len(self._text) - len(special), len(self._text))] if special in MARKS else []
            self._marks = [one for one in self._marks if one[1] > self._sent] + mark
        else:
            self._lookalikes += lookalikes(self._text, before)

    def _find(self, stop: str) -> int:
        """Where a stop text begins that was not sent, -1 without; it has a mark as a whole or not at all."""
        start = self._text.find(stop, self._sent)
        while start >= 0 and any(first < cut < end for cut in (start, start + len(stop)) for first, end in self._marks):
            start = self._text.find(stop, start + 1)
        return start

    def _cut_at_stop(self) -> bool:
        found = [(start, stop) for stop in self.stops if (start := self._find(stop)) >= 0]
        if found:
            start, self.stopped_by = min(found)
            self._text = self._text[:start]
        return bool(found)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        unsent = len(self._text) - self._sent
        return max(
            (
                length
                for stop in self.stops
                for length in range(1, min(len(stop) - 1, unsent) + 1)
                if self._text.endswith(stop[:length])
            ),
            default=0,
        )

    def _parse(self) -> ParsedReply:
        try:
            reply = parse_reply(self._whole + tokens.EOS, thinking=self.thinking)
        except MalformedReply as error:
            self.complaint = unmarked(error.message)
            return split_reply(self._whole, thinking=self.thinking)
        if reply.tool_calls:
            self.finish = "tool_calls"
        return reply

    def record(self) -> dict[str, Any]:
        """The JSON form: content, reasoning_content, tool_calls, ids (the end token included), finish_reason."""
        reply = self._reply.changed(unmarked)
        return {
            "content": reply.content,
            "reasoning_content": reply.reasoning_content,
            "tool_calls": reply.tool_calls,
            "ids": [token.id for token in self.tokens],
            "finish_reason": self.finish,
        }

    def logprobs(self) -> list[dict[str, Any]]:
        """For each token its log-probability and the alternatives."""
        return [
            {"id": token.id, "logprob": token.logprob, "top": [[id_, value] for id_, value in token.top]}
            for token in self.tokens
        ]


def _unmarked(pieces: list[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
    return [(kind, text) for kind, part in pieces if (text := unmarked(part))]
