"""Which tokens go through the model in a step: requests join while there are slots, each with its next chunk."""

from collections import deque
from dataclasses import dataclass

from dsv4cli.engine.config.capacity import MAX_STEP_TOKENS
from dsv4cli.engine.runtime.cache import Cache
from dsv4cli.engine.runtime.request import Request


@dataclass(frozen=True)
class Chunk:
    """One request's part of a step: tokens first .. end - 1 of it and then drafts, in the rows from `row` on."""

    request: Request
    first: int
    end: int
    row: int
    drafts: list[int]

    @property
    def tokens(self) -> int:
        """How many it has, drafts included."""
        return self.end - self.first + len(self.drafts)

    @property
    def ids(self) -> list[int]:
        """All of them."""
        return self.request.ids[self.first : self.end] + self.drafts

    @property
    def last_row(self) -> int:
        """The row of its last token."""
        return self.row + self.tokens - 1

    @property
    def newest_row(self) -> int:
        """The row of its last token that is no draft."""
        return self.last_row - len(self.drafts)


class Scheduler:
    """The requests of one cache, in the order in which they came."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._active)

    @property
    def active(self) -> list[Request]:
        """Those that have a sequence, in the order of their chunks."""
        return list(self._active)

    @property
    def joins(self) -> bool:
        """Whether the next step has a request that waits now."""
        return bool(self._waiting) and self._cache.free_slots > 0

    def add(self, request: Request) -> None:
        """Queues a request of at least one token; one that has a sequence goes on at once."""
        (self._waiting if request.sequence is None else self._active).append(request)

    def remove(self, request: Request) -> bool:
        """Takes a request out; whether it was there. Its sequence stays."""
        for queue in (self._waiting, self._active):
            if request in queue:
                queue.remove(request)
                return True
        return False

    def clear(self) -> None:
        """Takes every request out; sequences stay with whoever holds their requests."""
        self._waiting.clear()
        self._active.clear()

    def chunks(self) -> list[Chunk]:
        """The next step. A chunk ends where the state is to be kept."""
        while self._waiting and self._cache.free_slots:
            request = self._waiting.popleft()
            request.sequence = self._cache.allocate()
            self._active.append(request)
        chunks, row = [], 0
        for request in self._active:
            stops = [kept for kept in request.keep if kept > request.done]
            ahead = min([len(request.ids), *stops]) - request.done
            count = min(ahead, request.limits.prefill_chunk, MAX_STEP_TOKENS - row)
            if count > 0:
                chunk = Chunk(request, request.done, request.done + count, row, self._drafts(request, count, row))
                chunks.append(chunk)
                row += chunk.tokens
        return chunks

    def _drafts(self, request: Request, count: int, row: int) -> list[int]:
        """What follows the next `count` tokens of a request from this row on: drafts behind its newest."""
        catches_up = request.done + count == len(request.ids)
        return request.drafts[: MAX_STEP_TOKENS - row - count] if catches_up else []
