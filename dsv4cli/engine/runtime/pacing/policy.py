"""The constants of the scheduling policy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PacingPolicy:
    """How prefill shares the time with decode steps.

    Attributes:
        target: mean inter-token latency while prompts are prefilled, seconds.
        max_gap: at most 1 in 100 gaps between two tokens may exceed this many times the goal.
        burst_gap: a gap to prefill several whole prompts in one step may be this many times the goal.
        gaps_per_burst: how many gaps there are at least for each such gap.
        min_prefill_share: the least share of the time for prefill; the goal is above the target where decode steps
            leave less.
        min_efficiency: chunks that prefill less than this share of the tokens per second of the fastest are not used.
        max_passes: how often shorter prompts may go before a prompt.
        max_outlier: a step counts as at most this many times as long as expected.
    """

    target: float
    max_gap: float = 1.3
    burst_gap: float = 3.0
    gaps_per_burst: int = 200
    min_prefill_share: float = 0.2
    min_efficiency: float = 0.25
    max_passes: int = 8
    max_outlier: float = 1.5
