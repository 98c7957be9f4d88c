"""Whose step is next, so that tokens come in time: one of all that decode, or of prompts for as long as is left.

On the average the time between two steps that give tokens is the target or less, and few of them are longer than MOST
times that. A chunk takes nearly as long as one of many more tokens: a few large ones, with steps between them that read
nothing, read more than many small ones, and short prompts share one. Where nothing asks for bits that do not depend on
others, those who decode may go along in front of prompts, which takes hardly longer. Only the leader decides, for ranks
measure different times.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime.chunk_graphs import ROWS_EACH, room_of
from dsv4cli.engine.runtime.chunk_times import SIZES, STRANGE, ChunkTimes
from dsv4cli.engine.runtime.decoding_times import DecodingTimes
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Chunk, Pick
from dsv4cli.engine.runtime.ways import Apart, Mixed

# the part of the target that the first chunk is taken to need
FIRST_SHARE = 0.6
# the part of the time between two tokens that chunks have needed at least
LEAST = 0.1
# behind so many times between tokens that are not longer one may be, where that reads many more short prompts; as many
# as SAVED may come together
APART, SAVED = 100, 2
# how often another prompt may go before one
PATIENCE = 8


class Pace:
    """Decides for one engine whose steps have a target."""

    def __init__(
        self,
        target: float,
        captured: Mapping[int, float] | None = None,
        most: int | None = None,
        sequences: int = MAX_SLOTS - 1,
    ) -> None:
        """target: seconds between two tokens of a request. captured: as of `ChunkTimes`. most: tokens of a step that
        several requests share, beyond which they would change each other's bits; None: any. sequences: of a step with
        prompts."""
        self._most, self._sequences = most, sequences
        self._passed: dict[Request, int] = {}
        self._steps = DecodingTimes(target)
        self._captured = {} if captured is None else captured
        self._chunks = ChunkTimes(self._captured, FIRST_SHARE * target)
        # since the last step that gave tokens: when it ended, and the room of the chunks that were read
        self._ended: float | None = None
        self._read: list[int] = []
        # by how many seconds steps that gave tokens came later than they should, less those by which they came earlier
        self._behind = 0.0
        # times between tokens since one was longer for short prompts, for which none has been so since
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
        way = max(self._ways(left, decoding), key=Apart.value)
        room = way.room
        if not room:
            return Pick()
        longer = room if self._read or self._even < APART else way.burst()
        if longer != room:
            room, self._even = longer, self._even - APART
        for request in reading:
            self._passed[request] = self._passed.get(request, 0) + 1
        beside = [request.number for request in decoding[: len(way.front)]]
        most = max(min(room // ROWS_EACH, self._sequences) - len(beside), 1)
        return Pick(tuple(request.number for request in reading[:most]), room, tuple(beside))

    def _ways(self, left: Sequence[int], decoding: Sequence[Request]) -> list[Apart]:
        """Those that the next step may go: beside these requests, with so many tokens of each prompt left."""
        kinds = [Apart, Mixed] if self._most is None and len(decoding) < self._sequences else [Apart]
        tokens = [1 + len(request.drafts) for request in decoding]
        most = SIZES[-1] if self._most is None else self._most
        return [kind(self._chunks, self._steps, left, tokens, self._read, most, self._sequences) for kind in kinds]

    def _alone(self, reading: Sequence[Request], left: Sequence[int]) -> Pick | None:
        """Whose prompts, of so many tokens each, go where nobody decodes: all, or as many as may share a step; or as a
        captured one has room for, where that is all but a few."""
        if self._most is None:
            count = self._sequences
            if len(left) <= count or room_of(left[:count]) > max(self._captured, default=0):
                return None
        elif len(left) < 2 or room_of(left) <= self._most:
            return None
        else:
            count = max((n for n in range(2, len(left)) if room_of(left[:n]) <= self._most), default=1)
        return Pick(tuple(request.number for request in reading[:count]), room_of(left[:count]))

    def _ready(self) -> bool:
        """Whether prompts may go now: it is known what a step takes without them, and the time is not spent."""
        return self._ended is not None and self._steps.known and (bool(self._read) or self._behind <= 0)

    def note(self, pick: Pick | None, chunks: Sequence[Chunk], prepared: bool) -> None:
        """Takes in a step that has ended, and whether it took time that others do not."""
        now = perf_counter()
        if pick is None or prepared:
            self._rest()
            return
        if pick.requests:
            self._passed.update(dict.fromkeys((chunk.request for chunk in chunks), 0))
            if self._ended is None:  # nobody decoded: the time to the second tokens begins
                self._ended = now
            else:
                self._read.append(room_of([chunk.tokens for chunk in chunks]))
        if pick.decoding or not pick.requests:
            if self._ended is not None:
                self._learn(now - self._ended, pick, len(pick.decoding or chunks))
            self._ended, self._read = now, []

    def _order(self, reading: Sequence[Request]) -> list[Request]:
        """Those that were passed over too often, then the others, by how few tokens their prompts have left."""
        return sorted(
            reading,
            key=lambda one: (self._passed.get(one, 0) >= PATIENCE, one.done - len(one.ids), -one.number),
            reverse=True,
        )

    def _learn(self, seconds: float, pick: Pick, decoded: int) -> None:
        """Takes in the time between two tokens that ends with this step, which has decoded so many."""
        if not self._read:
            self._steps.learn(decoded, seconds)
        own, goal = 0.0 if pick.decoding else self._steps.of(decoded), self._steps.goal(decoded)
        expected = own + sum(map(self._chunks.of, self._read))
        self._even = min(self._even + 1, SAVED * APART)
        if self._read:
            self._chunks.learn(self._read, max(seconds - own, LEAST * seconds))
        self._behind = max(self._behind + min(seconds, STRANGE * expected) - goal, -goal)

    def _rest(self) -> None:
        self._ended, self._read, self._behind = None, [], 0.0
