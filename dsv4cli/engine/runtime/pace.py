"""Whose step is next, so that tokens come in time: one of all that decode, then prompts for as long as is left.

What a chunk of a prompt takes is learned from the time between two steps that gave tokens. Only the leader decides, for
ranks measure different times.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from time import perf_counter

from dsv4cli.engine.runtime.chunk_graphs import TOKENS
from dsv4cli.engine.runtime.gate import size_of
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Chunk, Pick

# tokens of a chunk beside requests that decode
SIZES = (*TOKENS, 1536, 2048, 3072, 4096)
# the most tokens of the first chunk, and the part of the time that there is which it is taken to need
FIRST, FIRST_SHARE = 256, 0.6
# what one more time adds to a mean, unless it is longer: then it takes its place, but is no more than twice as long
FASTER = 0.1
# what is left of the time of a size that was not read, so that it is tried again now and then
FORGET = 0.9995
# the part of the time between two tokens that chunks have needed at least
LEAST = 0.1
# how often another prompt may go before one
PATIENCE = 8


class Pace:
    """Decides for one engine whose steps have a target."""

    def __init__(self, target: float) -> None:
        """target: seconds between two tokens of a request."""
        self._target = target
        self._passed: dict[Request, int] = {}
        # seconds of a step without prompts by how many it decodes, and of a chunk by its size, as far as they are known
        self._decoding: dict[int, float] = {}
        self._reading: dict[int, float] = {}
        # since the last step that gave tokens: when it ended, and the sizes of the chunks that were read
        self._ended: float | None = None
        self._read: list[int] = []

    def pick(self, active: Sequence[Request]) -> Pick | None:
        """Whose step the next one is; None: that of all, where nobody waits for a token."""
        decoding = [request for request in active if request.decodes]
        reading = [request for request in active if not request.decodes]
        for gone in self._passed.keys() - set(reading):
            del self._passed[gone]
        if not decoding:
            self._rest()
            return None
        if not reading:
            return Pick()
        left = self._target - self._of_decoding(len(decoding)) - sum(map(self._of_chunk, self._read))
        size = max((size for size in SIZES if self._of_chunk(size) <= left), default=0)
        if self._ended is None or (self._read and not size):
            return Pick()
        return self._chunk(reading, max(size, SIZES[0]))

    def note(self, pick: Pick | None, chunks: Sequence[Chunk], prepared: bool) -> None:
        """Takes in a step that has ended, and whether it took time that others do not."""
        now = perf_counter()
        if pick is None or prepared:
            self._rest()
        elif pick.request is not None:
            self._read.append(_size(sum(chunk.tokens for chunk in chunks)))
        else:
            if self._ended is not None:
                self._learn(now - self._ended, len(chunks))
            self._ended, self._read = now, []

    def _chunk(self, reading: Sequence[Request], size: int) -> Pick:
        """The prompt that has the fewest tokens left, or one that was passed over too often."""
        left = {request: len(request.ids) - request.done for request in reading}
        first = max(reading, key=lambda one: (self._passed.get(one, 0) >= PATIENCE, -left[one], -one.number))
        for request in reading:
            self._passed[request] = 0 if request is first else self._passed.get(request, 0) + 1
        return Pick(first.number, min(size, left[first], first.prefill_chunk))

    def _learn(self, seconds: float, decoded: int) -> None:
        key = size_of(decoded)
        if not self._read:
            self._decoding[key] = _mean(self._decoding.get(key), seconds)
            return
        thought = [self._of_chunk(size) for size in self._read]
        share = max(seconds - self._of_decoding(decoded), LEAST * seconds) / sum(thought)
        # of several the time is known together only: it tells when they need more
        for size, before in zip(self._read, thought, strict=True) if share > 1 or len(set(self._read)) == 1 else ():
            self._reading[size] = _mean(self._reading.get(size), before * share)
        for size in self._reading.keys() - set(self._read):
            self._reading[size] *= FORGET

    def _of_decoding(self, requests: int) -> float:
        """What a step takes that decodes so many; of a number that was not timed that of the nearest one."""
        size = size_of(requests)
        nearest = min(self._decoding, key=lambda known: abs(known - size), default=size)
        return self._decoding.get(nearest, 0.0)

    def _of_chunk(self, size: int) -> float:
        """What a chunk takes, no less than a smaller one. The next size above those that were timed is taken to need no
        more than they do, so that it is tried; others are taken to need as much for each token."""
        if not self._reading:
            return self._target * FIRST_SHARE if size <= FIRST else inf
        smaller = [one for one in SIZES if one < size and one in self._reading]
        if not smaller:
            return self._reading[min(self._reading)]
        least = max(self._reading[one] for one in smaller)
        if size in self._reading:
            return max(self._reading[size], least)
        next_one = SIZES[SIZES.index(smaller[-1]) + 1]
        return least if size == next_one else self._reading[smaller[-1]] * size / smaller[-1]

    def _rest(self) -> None:
        self._ended, self._read = None, []


def _size(tokens: int) -> int:
    """The smallest size that has room for so many tokens, or the largest of all."""
    return SIZES[min(bisect_left(SIZES, tokens), len(SIZES) - 1)]


def _mean(before: float | None, seconds: float) -> float:
    if before is None:
        return seconds
    return min(seconds, 2 * before) if seconds > before else before + FASTER * (seconds - before)
