"""Which part of the prompts a step reads, beside requests that decode: these have a step of their own behind it, or
their tokens go in front of the prompts in the same step, which reads the weights once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dsv4cli.engine.runtime.chunk_graphs import room_of
from dsv4cli.engine.runtime.chunk_times import WORTH, ChunkTimes
from dsv4cli.engine.runtime.decoding_times import DecodingTimes

# times of the target that one of a hundred times between two tokens may be longer than
MOST = 1.2
# one that is longer for many short prompts is LONGEST times the target at most, and reads FASTER times as many of these
# a second
LONGEST, FASTER = 3.0, 1.5


@dataclass(frozen=True)
class Apart:
    """Chunks of prompts between steps of those that decode.

    prompts: of each the tokens that are left, in the order in which they go. decoding: of each that decodes the tokens
    of its next step. read: of each chunk since the last tokens its room. most: tokens of a step that several prompts
    share. sequences: that a step may have.
    """

    chunks: ChunkTimes
    steps: DecodingTimes
    prompts: Sequence[int]
    decoding: Sequence[int]
    read: Sequence[int]
    most: int
    sequences: int

    @property
    def front(self) -> Sequence[int]:
        """Of each that decodes in the step its tokens."""
        return ()

    def own(self, joining: int = 0) -> float:
        """Seconds between two tokens that are not those of chunks, where so many more decode then."""
        return self.steps.of(len(self.decoding) + joining)

    def cost(self, room: int) -> float:
        """Seconds that a step with so much room takes of those that the target leaves."""
        return self.chunks.of(room)

    def late(self, room: int, joining: int = 0) -> float:
        """What the time between two tokens is seldom more than with it."""
        return self.own(joining) + sum(map(self.chunks.late, (*self.read, room)))

    def fits(self, room: int, joining: int = 0) -> bool:
        """Whether that is in time."""
        return self.late(room, joining) <= MOST * self.steps.goal(len(self.decoding) + joining)

    def rate(self, room: int) -> float:
        """Tokens of prompts for each second that it costs."""
        whole = sum(self.prompts[: self.whole.get(room, 0)])
        return (whole or room - sum(self.front)) / self.cost(room)

    @cached_property
    def whole(self) -> dict[int, int]:
        """Of each room that a step may have for whole prompts, from the first on, their number."""
        rooms = {}
        for count in range(1, min(len(self.prompts), self.sequences - len(self.front)) + 1):
            room = room_of([*self.front, *self.prompts[:count]])
            if count == 1 or room <= self.most:
                rooms[room] = count
        return rooms

    @cached_property
    def room(self) -> int:
        """Of the step that reads fastest of those that fit; where none does and nothing was read yet, of the smallest
        that is worth it; else 0: none."""
        sizes = self._sizes(self.prompts[0])
        fitting = [size for size in sizes if self.fits(size)]
        size = max(fitting, key=self.rate, default=0 if self.read else sizes[0])
        return size if size < min(self.whole) else self._shared()

    def value(self) -> tuple[bool, bool, float]:
        """What makes a step better than one of another way: there is one; in time; then fast, else early."""
        room = self.room
        fits = bool(room) and self.fits(room, max(self.whole.get(room, 0) - 1, 0))
        return room > 0, fits, self.rate(room) if fits else -self.late(room)

    def burst(self) -> int:
        """The room that reads the most prompts a second, where so many more than the best that one time between tokens
        may be longer for it, or the best."""
        often = {room: count / self.chunks.of(room) for room, count in self.whole.items()}
        short = [room for room in often if self._is_short(room)]
        most, best = max(short, key=often.__getitem__, default=self.room), self.room
        return most if best in often and often[most] >= FASTER * often[best] else best

    def _is_short(self, room: int) -> bool:
        """Whether it may be that of a longer time between tokens."""
        joining = self.whole[room]
        longest = LONGEST * self.steps.goal(len(self.decoding) + joining)
        return self.own(joining) + self.chunks.of(room) <= longest

    def _sizes(self, tokens: int) -> list[int]:
        """Those of which so many tokens of one prompt may be read next."""
        least = room_of([*self.front, 1])
        return [size for size in self.chunks.worth(room_of([*self.front, tokens])) if size >= least]

    def _shared(self) -> int:
        """The room for as many whole prompts as one step reads fastest.

        They are taken for one prompt of their tokens: they share a step that fits, or the smallest that is worth it.
        None that reads much slower than another goes without need. Those who join count among those who decode.
        """
        limit = 0 if self.read else self._sizes(sum(self.prompts))[0]
        fitting = {room for room, count in self.whole.items() if self.fits(room, count - 1)}
        rooms = [room for room in self.whole if room <= limit or room in fitting] or [*self.whole][:1]
        fastest = max(map(self.rate, self.whole))
        worth = [room for room in rooms if self.rate(room) >= WORTH * fastest] or rooms
        return max([room for room in worth if room in fitting] or worth, key=self.rate)


class Mixed(Apart):
    """Steps of those that decode and, behind them, of prompts; between these such as read nothing."""

    @property
    def front(self) -> Sequence[int]:
        """All of these."""
        return self.decoding

    def own(self, joining: int = 0) -> float:
        """None: they decode in the step."""
        return 0.0

    def cost(self, room: int) -> float:
        """What it takes longer than a step without prompts; where it is shorter than the target no less than its part
        of that, for the rest is not saved up."""
        seconds, requests = self.chunks.of(room), len(self.decoding)
        step = self.steps.of(requests)
        return max(seconds - step, seconds * (1 - step / self.steps.goal(requests)))
