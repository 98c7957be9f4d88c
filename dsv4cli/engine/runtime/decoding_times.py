"""How long a step takes that decodes, and so how long the time between two tokens may be while prompts are read."""

from dsv4cli.engine.runtime.chunk_times import STRANGE
from dsv4cli.engine.runtime.gate import size_of

# prompts have at least so large a part of the time
SHARE = 0.2
# the part that one more time is of the mean
NEWEST = 0.1


class DecodingTimes:
    """Seconds of steps without prompts by how many requests they decode, as far as they are known."""

    def __init__(self, target: float) -> None:
        """target: seconds between two tokens of a request."""
        self._target = target
        self._seconds: dict[int, float] = {}

    @property
    def known(self) -> bool:
        """Whether any was timed."""
        return bool(self._seconds)

    def of(self, requests: int) -> float:
        """What a step takes that decodes so many; of a number that was not timed that of the nearest one."""
        size = size_of(requests)
        nearest = min(self._seconds, key=lambda known: abs(known - size), default=size)
        return self._seconds.get(nearest, 0.0)

    def goal(self, requests: int) -> float:
        """The target, or so much that prompts have their share beside steps of so many."""
        return max(self._target, self.of(requests) / (1 - SHARE))

    def learn(self, requests: int, seconds: float) -> None:
        """Takes in what a step took."""
        before = self._seconds.get(size_of(requests), seconds)
        self._seconds[size_of(requests)] = before + NEWEST * (min(seconds, STRANGE * before) - before)
