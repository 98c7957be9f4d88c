"""One answer as it arrives: tokens to text, stop strings, reasoning and content told apart; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dsv4cli.engine import tokens
from dsv4cli.engine.reply import Kind, MalformedReply, Reply, ReplyStream, parse_reply, split_reply
from dsv4cli.engine.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from dsv4cli.engine.generate import Step

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass
class Answer:
    """Takes the steps of one sequence; `push` returns the text that has become certain, by kind."""

    tokenizer: Tokenizer
    thinking: bool
    stops: Sequence[str] = ()
    steps: list["Step"] = field(default_factory=list)
    finish: FinishReason | None = None
    complaint: str = ""

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer)
        self._stream = ReplyStream(self.thinking)
        self._text = ""  # everything decoded, cut at a stop string
        self._sent = 0  # characters of it that went into the stream

    def push(self, step: "Step") -> list[tuple[Kind, str]]:
        """Adds a token; sets `finish` when the answer ends with it."""
        self.steps.append(step)
        self._text += self._decoder.push(step.token)
        if step.finish:
            self._text += self._decoder.flush()
        if self._cut_at_stop():
            self.finish = "stop"
        elif step.finish:
            self.finish = step.finish
        certain = len(self._text) if self.finish else len(self._text) - self._held_back()
        pieces = self._stream.push(self._text[self._sent : certain])
        self._sent = max(certain, self._sent)
        return pieces + (self._stream.flush() if self.finish else [])

    def _cut_at_stop(self) -> bool:
        found = [place for place in map(self._text.find, self.stops) if place >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(self._text) - self._sent), 0, -1):
                if self._text.endswith(stop[:length]):
                    longest = max(longest, length)
                    break
        return longest

    def reply(self) -> Reply:
        """The answer read by the strict parser where it is complete; otherwise reasoning and content as they stand.

        `complaint` then says why a complete answer could not be parsed.
        """
        if self._text.endswith(tokens.EOS):
            try:
                reply = parse_reply(self._text, thinking=self.thinking)
            except MalformedReply as error:
                self.complaint = error.message
            else:
                if reply.tool_calls:
                    self.finish = "tool_calls"
                return reply
        return split_reply(self._text, thinking=self.thinking)

    def record(self) -> dict[str, Any]:
        """The JSON form: content, reasoning_content, tool_calls, ids (the end token included), finish_reason."""
        reply = self.reply()
        return {
            "content": reply.content,
            "reasoning_content": reply.reasoning_content,
            "tool_calls": reply.tool_calls,
            "ids": [step.token for step in self.steps],
            "finish_reason": self.finish,
        }

    def logprobs(self) -> list[dict[str, Any]]:
        """For each token its log-probability and the alternatives."""
        return [
            {"id": step.token, "logprob": step.logprob, "top": [[token, value] for token, value in step.top]}
            for step in self.steps
        ]
