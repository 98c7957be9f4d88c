"""Token counts and speeds of a `dsv4 chat`."""

from dataclasses import dataclass, field

from dsv4cli.commands.chat.backend import ChatBackend
from dsv4cli.commands.clock import Clock


@dataclass
class SessionStats:
    """Totals of all turns, and the timing of the last answer.

    Attributes:
        turns: Answers generated.
        prefilled: Prompt tokens computed.
        reused: Prompt tokens from the prefix cache.
        sampled: Tokens sampled.
    """

    turns: int = 0
    prefilled: int = 0
    reused: int = 0
    sampled: int = 0
    last: Clock = field(default_factory=Clock)

    def add(self, backend: ChatBackend, sampled: int) -> None:
        """Count a turn of `sampled` sampled tokens."""
        self.turns += 1
        self.prefilled += backend.prefilled
        self.reused += backend.reused
        self.sampled += sampled
