"""Limits on thinking: the engine ends the thinking itself, so that tokens remain for an answer. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# 1/4 of an answer's tokens, at most 512, are reserved for the text after the thinking
ANSWER_SHARE = 4
MOST_KEPT = 512

Closed = Literal["", "budget", "limit", "end"]


@dataclass
class Thinking:
    """A `Constraint` that limits the thinking of an answer.

    Attributes:
        inside: whether the answer is thinking now.
        max_tokens: maximum number of tokens of the answer, including its thinking.
        budget: maximum number of its thinking tokens, None for no limit.
        closed: why the engine ended the thinking: "budget" if that is used up, "limit" if few of `max_tokens` are left,
            "end" if the model ended its answer while thinking.
    """

    inside: bool
    max_tokens: int
    budget: int | None
    think_end: int
    eos: tuple[int, ...]
    closed: Closed = ""

    def __post_init__(self) -> None:
        kept = min(max(1, self.max_tokens // ANSWER_SHARE), MOST_KEPT)
        self._most = max(0, self.max_tokens - kept - 1)
        self._tokens = 0
        self._just_closed = False

    def forced(self) -> int | None:
        """Return the token that must come next, if any."""
        if not self.inside:
            return None
        if self.budget is not None and self._tokens >= self.budget:
            return self._close("budget")
        return self._close("limit") if self._tokens >= self._most else None

    def banned(self) -> tuple[int, ...]:
        """Return the tokens that must not come next: no end token directly after thinking that the engine ended."""
        return self.eos if self._just_closed else ()

    def masks(self, drafts: Sequence[int]) -> tuple[()]:
        """Return no masks."""
        return ()

    def instead(self, token: int) -> int | None:
        """Return the end-of-thinking token in place of an end token inside the thinking; None to keep the token."""
        return self._close("end") if self.inside and token in self.eos else None

    def push(self, token: int) -> None:
        """Count a token of the answer."""
        self._just_closed = self.inside and token == self.think_end and bool(self.closed)
        self._tokens += 1
        self.inside = self.inside and token != self.think_end

    def _close(self, reason: Closed) -> int:
        self.closed = reason
        return self.think_end
