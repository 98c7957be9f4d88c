"""One answer as it is generated: decoding, stop texts, and separation of reasoning and content. No torch."""

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

# (kind, text) pairs that one token made certain
Pieces = list[tuple[Kind, str]]
FinishReason = Literal["stop", "length", "tool_calls"]
# the tokens between reasoning, content and calls; a stop text must not match a part of their text
MARKS = (tokens.THINK_END, tokens.DSML)


@dataclass
class Answer:
    """The answer of one sequence, built token by token.

    Attributes:
        tools: the tools that the prompt offers, in OpenAI's shape.
        finish: the finish reason, set by the last token.
        complaint: why the strict parser rejected the text of an answer that ended with the end token; empty otherwise.
        closed: why the thinking was ended from outside, set by the caller.
        stopped_by: the stop text that ended the answer.
        thoughts: number of tokens of reasoning.
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
        self._text = ""  # the decoded text without the end token, cut at a stop text
        self._lookalikes: list[int] = []  # positions of lookalikes of special tokens, see lookalikes.py
        self._marks: list[tuple[int, int]] = []  # positions of the unsent tokens of `MARKS`
        self._sent = 0  # characters of it that were added to the stream
        self._starts: list[int] = []  # length of the text before each token
        self._reply = ParsedReply("")

    @property
    def sampled(self) -> int:
        """Number of tokens so far."""
        return len(self.tokens)

    @property
    def shown(self) -> int:
        """Number of tokens that are certain to be part of the text.

        These are the tokens that begin before a stop text. The last of them may contain the beginning of the stop text.
        """
        if self.finish and self.stopped_by is None:
            return self.sampled
        return bisect_left(self._starts, self._sent)

    @property
    def prepared(self) -> bool:
        """Whether the step of the newest token compiled kernels or captured a graph."""
        return self.tokens[-1].prepared

    def push(self, token: "Token") -> Pieces:
        """Add a token, and return the text that is now certain, by kind. Sets `finish` if the answer ends."""
        return _unmarked(self.read(token))

    def read(self, token: "Token") -> list[tuple[Kind, str]]:
        """Add a token as `push` does, and return text with the marks of lookalikes.py."""
        self.tokens.append(token)
        self._starts.append(len(self._text))
        ended = token.finish == "stop"
        special = self.tokenizer.special.get(token.id)
        # special tokens outside the prompt format have no text
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
        """End an interrupted answer without a `finish`, and return the rest of its text. Does nothing if it is over."""
        return _unmarked(self.read_rest())

    def read_rest(self) -> list[tuple[Kind, str]]:
        """End the answer as `cut` does, and return text with the marks of lookalikes.py."""
        if self.finish:
            return []
        self._take(self._decoder.flush())
        pieces = self._stream.push(self._marked(self._sent, len(self._text))) + self._stream.flush()
        self._sent = len(self._text)
        self._reply = split_reply(self._whole, thinking=self.thinking)
        return pieces

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._stream.in_reasoning

    def message(self) -> tuple[Message, list[str]]:
        """Return a finished or cut answer as a message, and descriptions of what was repaired or left out."""
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
        """Return a part of the text with the marks of lookalikes.py."""
        return marked(self._text, self._lookalikes, start, end)

    def _take(self, text: str, special: str = "") -> None:
        """Append decoded text; `special` is the text of the special token at its end, if there is one."""
        before = len(self._text)
        self._text += text
        if special:
            mark = [(len(self._text) - len(special), len(self._text))] if special in MARKS else []
            self._marks = [one for one in self._marks if one[1] > self._sent] + mark
        else:
            self._lookalikes += lookalikes(self._text, before)

    def _find(self, stop: str) -> int:
        """Return the position of a stop text in the unsent text, or -1.

        A match may contain a mark of `MARKS` only as a whole.
        """
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
        """Return the number of characters at the end that may be the beginning of a stop text."""
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
        """Return the JSON form: content, reasoning_content, tool_calls, ids (with the end token), finish_reason."""
        reply = self._reply.changed(unmarked)
        return {
            "content": reply.content,
            "reasoning_content": reply.reasoning_content,
            "tool_calls": reply.tool_calls,
            "ids": [token.id for token in self.tokens],
            "finish_reason": self.finish,
        }

    def logprobs(self) -> list[dict[str, Any]]:
        """Return the log-probability and the alternatives of each token."""
        return [
            {"id": token.id, "logprob": token.logprob, "top": [[id_, value] for id_, value in token.top]}
            for token in self.tokens
        ]


def _unmarked(pieces: list[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
    return [(kind, text) for kind, part in pieces if (text := unmarked(part))]
