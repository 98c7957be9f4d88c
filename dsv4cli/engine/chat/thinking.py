"""How long an answer may think: when the engine ends the thinking itself, so that there is an answer; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# the share of an answer's tokens that is kept for what comes after the thinking, and the most that is
ANSWER_SHARE = 4
MOST_KEPT = 512

Closed = Literal["", "budget", "room", "end"]


@dataclass
class Thinking:
    """Follows the tokens of an answer; `inside` while it thinks.

    room: the most tokens of the answer. budget: of its thinking. closed: why the engine has ended the thinking: its
    budget was used up, or the room nearly, or the model ended its answer inside.
    """

    inside: bool
    room: int
    budget: int | None
    think_end: int
    eos: tuple[int, ...]
    closed: Closed = ""

    def __post_init__(self) -> None:
        kept = min(max(1, self.room // ANSWER_SHARE), MOST_KEPT)
        self._most = max(0, self.room - kept - 1)
        self._tokens = 0
        self._just_closed = False

    def forced(self) -> int | None:
        """The token that must come next, if any."""
        if not self.inside:
            return None
        if self.budget is not None and self._tokens >= self.budget:
            return self._close("budget")
        return self._close("room") if self._tokens >= self._most else None

    def banned(self) -> tuple[int, ...]:
        """The tokens that must not come next: an answer does not end where the engine has begun it."""
        return self.eos if self._just_closed else ()

    def masks(self, drafts: Sequence[int]) -> tuple[()]:
        """No others."""
        return ()

    def instead(self, token: int) -> int | None:
        """What to take for a token that was drawn, if not the token itself."""
        return self._close("end") if self.inside and token in self.eos else None

    def push(self, token: int) -> None:
        """Counts a token of the answer."""
        self._just_closed = self.inside and token == self.think_end and bool(self.closed)
        self._tokens += 1
        self.inside = self.inside and token != self.think_end

    def _close(self, reason: Closed) -> int:
        self.closed = reason
        return self.think_end
