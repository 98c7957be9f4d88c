"""How much of a prompt a cache already holds: in the sequence that ran last, or in snapshots of earlier boundaries."""

from dataclasses import dataclass

from dsv4cli.engine.runtime.cache import Cache, Snapshot
from dsv4cli.engine.runtime.request import Request


@dataclass(frozen=True, eq=False)
class Mark:
    """A snapshot and the list that its tokens begin, which only grows."""

    ids: list[int]
    snapshot: Snapshot


class Prefixes:
    """One conversation's state in a cache: the request that ran last and up to `most` marks, by length."""

    def __init__(self, cache: Cache, most: int, reads_next: bool = False) -> None:
        """reads_next: whether the state of a position depends on the token after it, which may be another now."""
        self.cache = cache
        self._most = most
        self._again = int(reads_next)
        self._marks: list[Mark] = []
        self._last: Request | None = None

    def begin(self, request: Request) -> None:
        """Gives a request a sequence that holds the longest beginning of its prompt, less its last token; it may be
        empty. Marks that the prompt does not begin with are dropped. Raises NotEnoughMemory."""
        ids = request.ids
        for stale in [mark for mark in self._marks if not self._held(mark, ids)]:
            self._drop(stale)
        best = max(self._marks, key=lambda mark: self._held(mark, ids), default=None)
        count = 0 if best is None else self._held(best, ids)
        last, running = self._last, self._running(ids)
        sequence = None if last is None else last.sequence
        if sequence is not None and running == 0 == count:
            self.cache.free(sequence)
            sequence = None
        if sequence is None:
            sequence = self.cache.allocate()
        if best is not None and count > running:
            self.cache.restore(sequence, best.snapshot)
        count = max(count, running)
        self.cache.roll_back(sequence, sequence.length - count)
        request.sequence, request.done = sequence, count
        self._last = request

    def mark(self) -> None:
        """Keeps the state as it is now; a mark of the same length goes, and the second where there are too many."""
        assert self._last is not None
        assert self._last.sequence is not None
        for same in [mark for mark in self._marks if mark.snapshot.length == self._last.done]:
            self._drop(same)
        self._marks.append(Mark(self._last.ids, self.cache.snapshot(self._last.sequence)))
        self._marks.sort(key=lambda mark: mark.snapshot.length)
        if len(self._marks) > self._most:
            self._drop(self._marks[1])

    def recover(self) -> list[Snapshot]:
        """Forgets the sequence, whose state is in doubt; the snapshots that are still held."""
        self._last = None
        return [mark.snapshot for mark in self._marks]

    def forget(self) -> None:
        """Gives everything back."""
        for mark in list(self._marks):
            self._drop(mark)
        last, self._last = self._last, None
        if last is not None and last.sequence is not None:
            self.cache.free(last.sequence)

    def _drop(self, mark: Mark) -> None:
        self._marks.remove(mark)  # first: what is dropped must not be held, also when this is interrupted
        self.cache.drop(mark.snapshot)

    def _held(self, mark: Mark, ids: list[int]) -> int:
        return self._usable(mark.ids, mark.snapshot.length, mark.snapshot.high, ids)

    def _running(self, ids: list[int]) -> int:
        last = self._last
        if last is None or last.sequence is None:
            return 0
        return self._usable(last.ids, last.done, last.sequence.high, ids)

    def _usable(self, held: list[int], length: int, high: int, ids: list[int]) -> int:
        """How many tokens a state of `length` tokens shares with the prompt, less its last one; 0 where rolling back
        does not reach them."""
        count = max(shared(held, ids, min(length, len(ids) - 1)) - self._again, 0)
        return count if high - count <= self.cache.rollback else 0


def shared(first: list[int], second: list[int], most: int) -> int:
    """How many tokens both begin with, at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
