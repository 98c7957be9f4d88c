"""Predicted times of decode steps and prefill chunks, learned from the steps that ran."""

from bisect import bisect_left
from collections.abc import Mapping

from dsv4cli.engine.runtime.pacing.policy import PacingPolicy
from dsv4cli.engine.runtime.step_sizes import batch_size, chunk_rows

# until a chunk is timed, one of this many rows is assumed to take as long as the latency target
FIRST_CHUNK_ROWS = 256
# the mean deviation of a chunk's time from its prediction before any was timed twice, relative
FIRST_DEVIATION = 0.01
# assumed 99th percentile, in mean deviations above the mean (normal distribution: 2.9, plus a margin)
TAIL = 3.0
# the weight of a new step in moving averages: of decode steps and of the scale common to all chunks; of the deviation;
# of one size of chunk
LEARNING_RATE, DEVIATION_RATE, SIZE_RATE = 0.1, 0.05, 0.03


class StepTimes:
    """Seconds of steps by size. Captured chunks were timed at capture; use corrects these times and adds others."""

    def __init__(self, policy: PacingPolicy, captured: Mapping[int, float]) -> None:
        """Args:
        policy: supplies the target and what counts as an outlier.
        captured: seconds of captured chunks by rows. More may be added to it later.
        """
        self._policy, self._captured = policy, captured
        self._decode: dict[int, float] = {}
        self._chunks: dict[int, float] = {}
        # ratio of current chunk times to the table, for all sizes: longer contexts take longer
        self._scale = 1.0
        self._deviation = FIRST_DEVIATION

    @property
    def decode_known(self) -> bool:
        """Whether a decode step was timed."""
        return bool(self._decode)

    def decode(self, sequences: int) -> float:
        """Return the seconds of a decode step, from the nearest batch size that was timed; 0 before any was."""
        size = batch_size(sequences)
        nearest = min(self._decode, key=lambda known: abs(known - size), default=size)
        return self._decode.get(nearest, 0.0)

    def goal(self, sequences: int) -> float:
        """Return the mean inter-token latency to aim at: the target, or what leaves prefill its least share."""
        return max(self._policy.target, self.decode(sequences) / (1 - self._policy.min_prefill_share))

    def chunk(self, rows: int) -> float:
        """Return the seconds of a prefill step. A size with a captured graph always takes the time of the full size."""
        known = self._known() or {FIRST_CHUNK_ROWS: self._policy.target}
        size = chunk_rows(rows)
        return self._scale * _interpolated(known, size if size in self._captured else min(rows, size))

    def late_chunk(self, rows: int) -> float:
        """Return the seconds that about 1 in 100 such steps exceeds."""
        return self.chunk(rows) * (1 + TAIL * self._deviation)

    def learn_decode(self, sequences: int, seconds: float) -> None:
        """Update the time of decode steps."""
        policy, size = self._policy, batch_size(sequences)
        before = self._decode.get(size, seconds)
        self._decode[size] = before + LEARNING_RATE * (min(seconds, policy.max_outlier * before) - before)

    def learn_chunk(self, rows: int, seconds: float) -> None:
        """Update the time of chunks: that of this size slowly, the common scale faster."""
        policy, size, known = self._policy, chunk_rows(rows), self._known()
        ratio = seconds / self.chunk(rows)
        if size not in known:
            self._chunks[size] = self.chunk(size) / self._scale * ratio
            return
        change = min(max(ratio, 1 / policy.max_outlier), policy.max_outlier) - 1
        self._deviation += DEVIATION_RATE * (abs(change) - self._deviation)
        self._scale *= 1 + LEARNING_RATE * change
        self._chunks[size] = known[size] * (1 + SIZE_RATE * change)

    def _known(self) -> dict[int, float]:
        return {**self._captured, **self._chunks}


def _interpolated(known: Mapping[int, float], rows: int) -> float:
    """Return the seconds of `rows` from those of other sizes: never more than a larger size takes.

    Those above the largest grow as the last two did, which tries the next one where only one size is known.
    """
    sizes = sorted(known)
    place = bisect_left(sizes, rows)
    if place == len(sizes):
        largest, before = sizes[-1], sizes[-2] if len(sizes) > 1 else 0
        if rows > chunk_rows(largest + 1):
            return known[largest] * rows / largest
        slope = max(0.0, known[largest] - known[before]) / (largest - before) if before else 0.0
        return known[largest] + slope * (rows - largest)
    above = min(known[size] for size in sizes[place:])
    if sizes[place] == rows:
        return above
    if not place:
        return above * rows / sizes[0]
    smaller, larger = sizes[place - 1], sizes[place]
    below = min(known[smaller], above)
    return below + (above - below) * (rows - smaller) / (larger - smaller)
