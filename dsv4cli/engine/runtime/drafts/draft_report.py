"""What an engine's drafts have come to: how many were made, and how many the model drew itself; no torch."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class DraftReport:
    """The steps that gave requests tokens, each counted once a request, with drafts or without, and what they gave.

    drafted, accepted: how many drafts were verified, how many of them the model drew itself. per_position: accepted
    drafts by their place behind the newest token. tokens: what these steps gave.
    """

    drafter: Literal["mtp", "dspark"]
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)
    tokens: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """What a step gave a request; None before the first."""
        return self.tokens / self.steps if self.steps else None

    def since(self, before: "DraftReport | None") -> "DraftReport":
        """What has come after `before`, an earlier report of the same engine, None for its beginning."""
        if before is None:
            return self
        earlier = before.per_position + [0] * (len(self.per_position) - len(before.per_position))
        return DraftReport(
            self.drafter,
            self.steps - before.steps,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            [now - then for now, then in zip(self.per_position, earlier, strict=True)],
            self.tokens - before.tokens,
        )

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "drafter": self.drafter,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "per_position": self.per_position,
            "tokens_per_step": self.tokens_per_step,
        }
