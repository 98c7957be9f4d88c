"""Timing of generated tokens, and the speeds that follow from it."""

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dsv4cli.output import counted, duration_text

if TYPE_CHECKING:
    from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
    from dsv4cli.engine.runtime.engine import Engine
    from dsv4cli.engine.weights.offload import ExpertOffload

# tokens between updates of a progress bar
TOKENS_BETWEEN = 50


@dataclass
class Clock:
    """When tokens arrived, in seconds from the start.

    Attributes:
        prepared: Seconds of steps that prepared kernels or captured graphs. The rate excludes them.
        compiled: Number of kernels compiled in those steps.
        experts: Offloaded experts, if copies from host memory took part of the time.
        drafts: Draft statistics, once all answers are complete.
    """

    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    prepared: float = 0.0
    compiled: int = 0
    experts: "ExpertOffload | None" = None
    drafts: "DraftReport | None" = None

    def __post_init__(self) -> None:
        self._steady, self._seconds, self._begun = 0, 0.0, False

    def tick(self, prepared: bool = False, *, later: bool = True) -> None:
        """Count one token. prepared: its step prepared kernels. later: it is not the first token of its answer."""
        now = perf_counter() - self.start
        passed = now - self.last
        self._begun |= later and self.tokens > 0  # until then, all tokens come from the answers' first steps
        if prepared:
            self.prepared += passed
        elif self._begun:
            self._steady += 1
            self._seconds += passed
        self.last = now
        self.first = self.first or now
        self.tokens += 1

    def note_end(self, engine: "Engine") -> None:
        """Store the engine's draft statistics and number of compiled kernels."""
        self.drafts, self.compiled = engine.draft_report(), engine.compiled

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first token."""
        return self._steady / self._seconds if self._seconds > 0 else None

    @property
    def speed(self) -> str:
        """The rate as text; empty if there is none."""
        if not self.rate:
            return ""
        return f"{self.rate:.1f} tokens/s" if self.rate >= 1 else f"{self.rate:.2g} tokens/s"

    def activity(self, waiting: bool) -> str:
        """Return text to show next to a progress bar's count. waiting: kernels are being compiled."""
        if waiting:
            return "compiling kernels …"
        return f"{self.rate:,.0f} tokens/s" if self.rate else "prefill"

    def record(self) -> dict[str, Any]:
        """Return the timing as JSON values."""
        drafts = None if self.drafts is None else self.drafts.record()
        rates = {"seconds_to_first_token": self.first, "tokens_per_second": self.rate}
        return rates | {"kernels_compiled": self.compiled, "draft": drafts}

    def sentence(self) -> str:
        """Return the timing as text."""
        rate = f", then {self.speed}" if self.rate else ""
        prepared = f"; {duration_text(self.prepared)} in steps that prepared kernels or graphs" if self.prepared else ""
        compiled = f", {self.compiled:,} compiled" if self.compiled else ""
        return f"{counted(self.tokens, 'token')}; first token after {self.first:.2f} s{rate}{prepared}{compiled}"
