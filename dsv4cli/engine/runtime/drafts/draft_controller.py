"""Chooses the draft length from acceptance rates and step times. No torch.

It changes only when tokens come, not which, so it may read the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime.step_sizes import batch_size

# bins of the drafter's reported probabilities, and the number of imaginary drafts per bin that initially confirm them
BINS, BELIEF = 10, 2.0
# weight of a new step in the mean of times, and in the mean of probabilities; decay of a bin per new draft
RATE, SOON, FORGET = 0.1, 0.2, 0.99
# initial acceptance probability; and the minimum to verify drafts before any step was timed
FIRST_GUESS, WORTH_A_TRY = 0.8, 0.25
# while drafts do not pay, one step in PROBE still drafts, because that can change; the next steps draft too while
# SURPRISE times as many drafts as expected are accepted, but at most PATIENCE steps
PROBE, SURPRISE, MAX_CREDIT = 128, 1.5, 3
# steps with fewer rows than any timed one: minimum share of the time that does not depend on rows
FIXED_SHARE = 0.5
# steps with more rows than any timed one: minimum time per added row, as a share
LEAST_ROW = 0.05


@dataclass
class StepCosts:
    """Mean step time in seconds by (sequences, rows per sequence). The first sample is dropped: it may include
    compilation.
    """

    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    begun: set[tuple[int, int]] = field(default_factory=set)

    def note(self, sequences: int, amount: int, seconds: float) -> None:
        """Add a step's time."""
        key = batch_size(sequences), amount
        if key not in self.begun:
            self.begun.add(key)
            return
        before = self.seconds.get(key)
        self.seconds[key] = seconds if before is None else before + RATE * (min(seconds, 2 * before) - before)

    def guess(self, sequences: int, amount: int) -> float | None:
        """Return the expected time of a step; None before any was timed.

        For a size that was not timed it is an underestimate, so that the size is tried.
        """
        size = batch_size(sequences)
        known = {own: value for (other, own), value in self.seconds.items() if other == size}
        if not known:
            return None
        if amount in known:
            return known[amount]
        smaller = max((own for own in known if own < amount), default=None)
        if smaller is not None:
            return known[smaller] * (1 + LEAST_ROW * (amount - smaller))
        nearest = min(known)
        return known[nearest] * (FIXED_SHARE + (1 - FIXED_SHARE) * amount / nearest)


class DraftController:
    """Chooses the draft length for one engine.

    Args:
        most: maximum number of draft tokens per sequence.
        rows: maximum number of rows of a step with draft tokens.
    """

    def __init__(self, most: int, rows: int = MAX_SLOTS) -> None:
        self._most, self._rows = most, rows
        self.verifying, self.drafting = StepCosts(), StepCosts()
        self._accepted = [(number + 0.5) / BINS * BELIEF for number in range(BINS)]
        self._seen = [BELIEF] * BINS
        self._mean = [FIRST_GUESS] * most
        # steps since drafts have paid; of drafts that are made to see: whether the last step made some, how many more
        # do; of the first drafts of this step: how many were taken to be right, and were
        self._closed, self._probing, self._credit = 0, False, 0
        self._thought, self._right = 0.0, 0

    def believed(self, chance: float) -> float:
        """Return the acceptance rate of draft tokens for which the drafter reports this probability."""
        number = _bin(chance)
        return self._accepted[number] / self._seen[number]

    def drafts(self, sequences: int, chances: Sequence[Sequence[float]]) -> int:
        """Return how many of the available draft tokens the next step verifies per sequence, given their
        probabilities.
        """
        longest = max((len(own) for own in chances), default=0)
        most = min(longest, self._most_per_sequence(sequences))
        drafting = self.drafting.guess(sequences, longest) or 0.0
        expected, survival = [float(sequences)], [1.0] * len(chances)
        for number in range(most):
            survival = [
                so_far * (self.believed(own[number]) if number < len(own) else 0.0)
                for so_far, own in zip(survival, chances, strict=True)
            ]
            expected.append(expected[-1] + sum(survival))
        if not self.verifying.seconds:
            return sum(more - less > WORTH_A_TRY * sequences for less, more in pairwise(expected))
        least = min(most, int(self._probing))
        return max(
            range(least, most + 1), key=lambda count: (self._worth(expected[count], sequences, count, drafting), -count)
        )

    def count(self, sequences: int) -> int:
        """Return how many tokens to draft after the next step of this many sequences."""
        most = min(self._most, self._most_per_sequence(sequences))
        if not self.drafting.seconds:
            return most
        best = max(range(most + 1), key=lambda count: (self._steady(sequences, count), -count))
        self._closed = 0 if best else self._closed + 1
        if self._thought:
            change = 1 if self._right > SURPRISE * self._thought else -1
            self._credit = min(max(self._credit + change, 0), MAX_CREDIT)
        self._probing = not best and (self._credit > 0 or self._closed % PROBE == 0)
        self._thought, self._right = 0.0, 0
        return best or min(most, int(self._probing))

    def note_drafts(self, chances: Sequence[float], verified: int, accepted: int) -> None:
        """Add one sequence's step: its draft tokens' probabilities, how many were verified and how many accepted."""
        for number in range(self._most if chances else 0):  # drafts beyond the last count as the last
            self._mean[number] += SOON * (self.believed(chances[min(number, len(chances) - 1)]) - self._mean[number])
        if verified:
            self._thought, self._right = self._thought + self.believed(chances[0]), self._right + min(accepted, 1)
        for number in range(min(verified, accepted + 1)):
            at = _bin(chances[number])
            self._seen[at] = FORGET * self._seen[at] + 1
            self._accepted[at] = FORGET * self._accepted[at] + (number < accepted)

    def _most_per_sequence(self, sequences: int) -> int:
        """Return the draft tokens per sequence that fit a step."""
        return max(self._rows // batch_size(sequences) - 1, 0)

    def _steady(self, sequences: int, count: int) -> float:
        """Return the tokens per second if every step drafts and verifies this many."""
        expected, survival = 1.0, 1.0
        for mean in self._mean[:count]:
            survival *= mean
            expected += survival
        drafting = (self.drafting.guess(sequences, count) or 0.0) if count else 0.0
        return self._worth(expected, sequences, count, drafting)

    def _worth(self, tokens: float, sequences: int, count: int, drafting: float) -> float:
        return tokens / ((self.verifying.guess(sequences, count + 1) or 1e-9) + drafting)


class AlwaysDraft(DraftController):
    """Verifies every draft token that fits a step, whatever it costs: to see what drafts change."""

    def drafts(self, sequences: int, chances: Sequence[Sequence[float]]) -> int:
        """Return all available draft tokens."""
        return min(max(map(len, chances), default=0), self.count(sequences))

    def count(self, sequences: int) -> int:
        """Return as many as fit."""
        return min(self._most, self._most_per_sequence(sequences))


def _bin(chance: float) -> int:
    return min(max(int(chance * BINS), 0), BINS - 1)
