"""How long a chunk of a prompt takes beside requests that decode: what was timed, and what that says of other sizes."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

from dsv4cli.engine.runtime.chunk_graphs import TOKENS

# tokens of a chunk
SIZES = (*TOKENS, 3072, 4096)
# the most tokens of the first chunk where none was timed
FIRST = 256
# the part of a difference that all sizes take at once, and that which a size keeps for itself: how long sequences are
# changes all of them, how chunks differ does not change
OF_ALL, OF_ONE = 0.1, 0.03
# a chunk reads at least so large a part of what the fastest reads in the same time
WORTH = 0.25
# so large a part of its tokens a chunk has at least that tells what its size takes
NEARLY = 0.75
# what took long counts as so many times longer than it was taken to be at most, or shorter
STRANGE = 1.5
# chunks that take longer than others by more than so many times what they do on the average are few
RARE = 3.0
# that average, before there is one; and the part of it that one more chunk is
USUAL, NEWEST = 0.01, 0.05


class ChunkTimes:
    """Seconds of a chunk by its size: as it was captured, corrected by what it took in use."""

    def __init__(self, captured: Mapping[int, float], first: float) -> None:
        """captured: seconds of sizes as they were timed alone, which may come later. first: what a chunk is taken to
        need when none was timed."""
        self._captured, self._first = captured, first
        self._own: dict[int, float] = {}
        self._factor = 1.0
        self._spread = USUAL
        # of each size, before the factor, and for how many captured sizes that was made
        self._table: dict[int, float] = {}
        self._made_for = -1

    def of(self, tokens: int) -> float:
        """What so many take: the smallest size that has room for them, and no more than a larger one. A size above
        those that were timed is taken to grow as these do, which tries the next one; others are taken to need as much
        for each token."""
        if self._made_for != len(self._captured):
            self._made_for, known = len(self._captured), self._known()
            self._table = {size: _expected(known, size) for size in SIZES} if known else {}
        if not self._table:
            return self._first if tokens <= FIRST else inf
        return self._factor * self._table[rounded(tokens)]

    def late(self, tokens: int) -> float:
        """What they seldom take more than."""
        return self.of(tokens) * (1 + RARE * self._spread)

    def rate(self, size: int) -> float:
        """Tokens a second."""
        return size / self.of(size)

    def worth(self, tokens: int) -> list[int]:
        """The sizes of which so many tokens may be read next: not so small that others read them in much less time, nor
        where a larger one takes no longer, but that which has room for all of them."""
        seconds, last, timed = {size: self.of(size) for size in SIZES}, rounded(tokens), self._captured
        least = WORTH * max(size / seconds[size] for size in SIZES)
        sizes = [size for size in SIZES if size == last or (size < last and size / seconds[size] >= least)]
        return [
            size
            for size in sizes
            if not any(larger in timed and seconds[larger] <= seconds[size] for larger in sizes if larger > size)
        ]

    def learn(self, chunks: Sequence[int], seconds: float) -> None:
        """Takes in what chunks of so many tokens took together, where these tell what their sizes take: all but those
        that have much fewer tokens and are not captured."""
        if any(rounded(tokens) not in self._captured and tokens < NEARLY * rounded(tokens) for tokens in chunks):
            return
        thought, known = {rounded(tokens): self.of(tokens) for tokens in chunks}, self._known()
        ratio = seconds / sum(thought[rounded(tokens)] for tokens in chunks)
        near = min(max(ratio, 1 / STRANGE), STRANGE)
        for size, before in thought.items():
            if size in known:
                self._own[size] = known[size] * (1 + OF_ONE * (near - 1))
            else:
                self._own[size] = before / self._factor * ratio
        if thought.keys() <= known.keys():
            self._spread += NEWEST * (abs(near - 1) - self._spread)
            self._factor *= 1 + OF_ALL * (near - 1)
        self._made_for = -1

    def _known(self) -> dict[int, float]:
        return {**self._captured, **self._own}


def rounded(tokens: int) -> int:
    """The smallest size that has room for so many tokens, or the largest of all."""
    return SIZES[min(bisect_left(SIZES, tokens), len(SIZES) - 1)]


def _expected(known: Mapping[int, float], size: int) -> float:
    """What a size takes, of which or of others it is known."""
    sizes = sorted(known)
    place = bisect_left(sizes, size)
    if place == len(sizes):
        return _beyond(sizes, known, size)
    above = min(known[one] for one in sizes[place:])
    if sizes[place] == size or not place:
        return above
    smaller, larger = sizes[place - 1], sizes[place]
    below = min(known[smaller], above)
    return below + (above - below) * (size - smaller) / (larger - smaller)


def _beyond(sizes: list[int], known: Mapping[int, float], size: int) -> float:
    """What a size above all these takes."""
    largest = sizes[-1]
    if size > SIZES[bisect_left(SIZES, largest) + 1]:
        return known[largest] * size / largest
    slopes = [(known[more] - known[fewer]) / (more - fewer) for fewer, more in pairwise(sizes[-2:])]
    return known[largest] + max([0.0, *slopes]) * (size - largest)
