"""Whose step is next, so that tokens come in time: one of all that decode, then prompts for as long as is left.

On the average the time between two steps that give tokens is the target or less, and few of them are longer than MOST
times that. A chunk takes nearly as long as one of many more tokens: a few large ones, with steps between them that read
nothing, read more than many small ones, and short prompts share one. Only the leader decides, for ranks measure
different times.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter

from dsv4cli.engine.runtime.chunk_graphs import QUESTION, room_of
from dsv4cli.engine.runtime.chunk_times import SIZES, STRANGE, WORTH, ChunkTimes
from dsv4cli.engine.runtime.gate import size_of
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Chunk, Pick

# times of the target that one of a hundred times between two tokens may be longer than
MOST = 1.2
# prompts have at least so large a part of the time
SHARE = 0.2
# the part of the target that the first chunk is taken to need
FIRST_SHARE = 0.6
# the part that one more time is of the mean of steps without prompts
NEWEST = 0.1
# the part of the time between two tokens that chunks have needed at least
LEAST = 0.1
# behind so many times between tokens that are not longer one may be LONGEST times the target, where so many times as
# many short prompts a second are read; as many as SAVED may come together
APART, LONGEST, FASTER, SAVED = 100, 3.0, 2.0, 2
# how often another prompt may go before one
PATIENCE = 8


class Pace:
    """Decides for one engine whose steps have a target."""

    def __init__(self, target: float, captured: Mapping[int, float] | None = None, most: int | None = None) -> None:
        """target: seconds between two tokens of a request. captured: as of `ChunkTimes`. most: tokens of a step that
        several prompts share, beyond which they would change each other's bits; None: any."""
        self._target, self._most = target, most
        self._passed: dict[Request, int] = {}
        # seconds of a step without prompts by how many it decodes, as far as they are known, and of chunks
        self._decoding: dict[int, float] = {}
        self._chunks = ChunkTimes({} if captured is None else captured, FIRST_SHARE * target)
        # since the last step that gave tokens: when it ended, and the tokens of the chunks that were read
        self._ended: float | None = None
        self._read: list[int] = []
        # by how many seconds steps that gave tokens came later than they should, less those by which they came earlier
        self._behind = 0.0
        # times between tokens that were not longer, for which none has been since
        self._even = SAVED * APART

    def pick(self, active: Sequence[Request]) -> Pick | None:
        """Whose step the next one is; None: that of all, where nobody waits for a token."""
        decoding = [request for request in active if request.decodes]
        reading = self._order([request for request in active if not request.decodes])
        left = [len(request.ids) - request.done for request in reading]
        for gone in self._passed.keys() - set(reading):
            del self._passed[gone]
        if not decoding:
            self._rest()
            return self._alone(reading, left)
        if not reading or not self._ready():
            return Pick()
        size = self._size(left[0], self._seconds(len(decoding)))
        if not size:
            return Pick()
        for request in reading:
            self._passed[request] = self._passed.get(request, 0) + 1
        if size >= left[0]:
            size = self._shared(left, len(decoding))
        return Pick(tuple(request.number for request in reading[: max(size // QUESTION, 1)]), size)

    def _alone(self, reading: Sequence[Request], left: Sequence[int]) -> Pick | None:
        """Whose prompts, of so many tokens each, go where nobody decodes: all, or as many as may share a step."""
        if self._most is None or len(left) < 2 or room_of(left) <= self._most:
            return None
        count = max((n for n in range(2, len(left)) if room_of(left[:n]) <= self._most), default=1)
        return Pick(tuple(request.number for request in reading[:count]), room_of(left[:count]))

    def _ready(self) -> bool:
        """Whether prompts may go now: it is known what a step takes without them, and the time is not spent."""
        return self._ended is not None and bool(self._decoding) and (bool(self._read) or self._behind <= 0)

    def note(self, pick: Pick | None, chunks: Sequence[Chunk], prepared: bool) -> None:
        """Takes in a step that has ended, and whether it took time that others do not."""
        now = perf_counter()
        if pick is None or prepared:
            self._rest()
        elif pick.requests:
            self._passed.update(dict.fromkeys((chunk.request for chunk in chunks), 0))
            self._read.append(room_of([chunk.tokens for chunk in chunks]))
        else:
            if self._ended is not None:
                self._learn(now - self._ended, len(chunks))
            self._ended, self._read = now, []

    def _order(self, reading: Sequence[Request]) -> list[Request]:
        """Those that were passed over too often, then the others, by how few tokens their prompts have left."""
        return sorted(
            reading,
            key=lambda one: (self._passed.get(one, 0) >= PATIENCE, one.done - len(one.ids), -one.number),
            reverse=True,
        )

    def _size(self, tokens: int, seconds: float) -> int:
        """Of so many tokens the part that is read fastest, where those who decode have so many seconds for prompts; 0
        where what was read already leaves too few."""
        worth = self._chunks.worth(tokens)
        fitting = [size for size in worth if self._chunks.late(size) <= seconds]
        return max(fitting, key=self._chunks.rate, default=0 if self._read else worth[0])

    def _shared(self, prompts: Sequence[int], decoding: int) -> int:
        """The room for as many of these prompts, from the first on, as one step reads fastest.

        prompts: the tokens that each has left; decoding: how many requests decode. They share a step that fits into the
        time that is left, or, where larger ones read far more a second, one as a prompt of all their tokens gets.
        """
        limit = 0 if self._read else self._chunks.worth(sum(prompts))[0]
        rates, counts, fitting, most = {}, {}, set(), SIZES[-1] if self._most is None else self._most
        for count in range(1, len(prompts) + 1):
            room = room_of(prompts[:count])
            if count == 1 or room <= most:
                rates[room], counts[room] = sum(prompts[:count]) / self._chunks.of(room), count
                if self._chunks.late(room) <= self._seconds(decoding + count - 1):  # these decode then
                    fitting.add(room)
        rooms = [room for room in rates if room <= limit or room in fitting] or [*rates][:1]
        worth = [room for room in rooms if rates[room] >= WORTH * max(rates.values())] or rooms
        best = max([room for room in worth if room in fitting] or worth, key=rates.__getitem__)
        return self._burst(counts, decoding, best)

    def _burst(self, counts: Mapping[int, int], decoding: int, best: int) -> int:
        """Of rooms for so many prompts the one that reads the most of them a second, where so many more that one time
        between tokens may be longer for it, or the one that is best else."""
        if self._read or self._even < APART:
            return best
        often = {room: count / self._chunks.of(room) for room, count in counts.items()}
        steps = {room: self._of_decoding(decoding + count) for room, count in counts.items()}
        short = [room for room in often if self._chunks.of(room) + steps[room] <= LONGEST * self._goal(steps[room])]
        most = max(short, key=often.__getitem__, default=best)
        return most if often[most] >= FASTER * often[best] else best

    def _learn(self, seconds: float, decoded: int) -> None:
        if not self._read:
            before = self._decoding.get(size_of(decoded), seconds)
            self._decoding[size_of(decoded)] = before + NEWEST * (min(seconds, STRANGE * before) - before)
        step = self._of_decoding(decoded)
        expected, goal = step + sum(map(self._chunks.of, self._read)), self._goal(step)
        self._even = max(self._even - APART, 0) if seconds > MOST * goal else min(self._even + 1, SAVED * APART)
        if self._read:
            self._chunks.learn(self._read, max(seconds - step, LEAST * seconds))
        self._behind = max(self._behind + min(seconds, STRANGE * expected) - goal, -goal)

    def _seconds(self, decoding: int) -> float:
        """What prompts may take in what is left of the time between two tokens of so many requests."""
        step = self._of_decoding(decoding)
        return MOST * self._goal(step) - step - sum(map(self._chunks.late, self._read))

    def _goal(self, step: float) -> float:
        """The target, or so much that prompts have their share beside steps of so many seconds."""
        return max(self._target, step / (1 - SHARE))

    def _of_decoding(self, requests: int) -> float:
        """What a step takes that decodes so many; of a number that was not timed that of the nearest one."""
        size = size_of(requests)
        nearest = min(self._decoding, key=lambda known: abs(known - size), default=size)
        return self._decoding.get(nearest, 0.0)

    def _rest(self) -> None:
        self._ended, self._read, self._behind = None, [], 0.0
