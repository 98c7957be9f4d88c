"""Statistics of speculative decoding: how many tokens were drafted and accepted. No torch."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class DraftReport:
    """Counts over steps that gave requests tokens, once per request and step, with or without draft tokens.

    Attributes:
        drafted, accepted: draft tokens that were verified, and accepted.
        per_position: accepted draft tokens by position after the newest token.
        tokens: what these steps gave.
    """

    drafter: Literal["mtp", "dspark"]
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)
    tokens: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens per step and request; None before the first step."""
        return self.tokens / self.steps if self.steps else None

    def since(self, before: "DraftReport | None") -> "DraftReport":
        """Return the counts since `before`, an earlier report of the same engine; None means its start."""
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
        """Return the report for JSON."""
        return {
            "drafter": self.drafter,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "per_position": self.per_position,
            "tokens_per_step": self.tokens_per_step,
        }
