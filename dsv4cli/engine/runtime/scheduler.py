"""Which tokens go through the model in a step: requests join while there is room, each with its next chunk."""

from collections import deque

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, MAX_STEP_TOKENS, ROLLBACK
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.cache import Cache, blocks_of
from dsv4cli.engine.runtime.state.prefix_cache import PrefixCache
from dsv4cli.engine.runtime.step import Chunk, StepChoice
from dsv4cli.engine.runtime.step_sizes import rows_needed


class Scheduler:
    """The requests of one cache, in the order in which they came."""

    def __init__(self, cache: Cache, prefixes: PrefixCache | None = None, blocks: int | None = None) -> None:
        """blocks: what all sequences together may take at most; without that number they take what they need."""
        self._cache, self._prefixes, self._blocks = cache, prefixes, blocks
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
    def waiting(self) -> int:
        """How many have none yet."""
        return len(self._waiting)

    @property
    def joins(self) -> bool:
        """Whether the next step has a request that waits now."""
        return bool(self._waiting) and self._cache.free_slots > 0 and self._fits(self._waiting[0])

    @property
    def room(self) -> int | None:
        """The most tokens of a prompt and its answer, None where only memory bounds them."""
        return None if self._blocks is None else self._blocks * BLOCK_TOKENS - ROLLBACK

    def add(self, request: Request) -> None:
        """Queues a request of at least one token; one that has a sequence goes on at once."""
        (self._waiting if request.sequence is None else self._active).append(request)
        self._admit()

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

    def of(self, pick: StepChoice | None) -> list[Request]:
        """The requests whose step the next one may be, in the order of their chunks."""
        if pick is None:
            return self.active
        if not pick.requests:
            return [request for request in self._active if request.decodes]
        active = {request.number: request for request in self._active}
        return [active[number] for number in (*pick.decoding, *pick.requests)]

    def chunks(self, pick: StepChoice | None = None) -> list[Chunk]:
        """The next step. A chunk ends where the state is to be kept."""
        self._admit()
        chunks: list[Chunk] = []
        picked = pick or StepChoice()
        row, most = 0, min(picked.tokens or MAX_STEP_TOKENS, MAX_STEP_TOKENS)
        for place, request in enumerate(self.of(pick)):
            count = min(self._stop(request) - request.done, request.prefill_chunk)
            others = picked.tokens and place > len(picked.decoding)
            if others and not self._joins(request, count, chunks, most):
                continue
            count = min(count, most - row)
            if count > 0:
                chunk = Chunk(request, request.done, request.done + count, row, self._drafts(request, count, row))
                chunks.append(chunk)
                row += chunk.tokens
        return chunks

    def _joins(self, request: Request, count: int, chunks: list[Chunk], most: int) -> bool:
        """Whether so many tokens of a prompt go beside these chunks: where there is room for all of them, and nothing
        of these is kept that the prompt begins with, for then it is found in the next step."""
        if rows_needed([*(chunk.tokens for chunk in chunks), count]) > most:
            return False
        return self._prefixes is None or not any(
            self._prefixes.gives(chunk.request, chunk.end, request) for chunk in chunks
        )

    def _admit(self) -> None:
        """Those that have waited longest get a sequence, while there is room for all that it may become."""
        while self.joins:
            request = self._waiting.popleft()
            request.sequence = self._cache.allocate()
            self._active.append(request)
            if self._prefixes is not None:
                self._prefixes.begin(request)

    def _fits(self, request: Request) -> bool:
        taken = sum(blocks_at_end(one) for one in self._active)
        return self._blocks is None or taken + blocks_at_end(request) <= self._blocks

    def _stop(self, request: Request) -> int:
        """Where the request's next chunk ends at the latest. What others have read of a prompt meanwhile is found when
        its first chunk comes."""
        if self._prefixes is None:
            return len(request.ids)
        if request.done == request.cached:
            self._prefixes.begin(request)
        return self._prefixes.stop(request)

    def _drafts(self, request: Request, count: int, row: int) -> list[int]:
        """What follows the next `count` tokens of a request from this row on: drafts behind its newest."""
        catches_up = request.done + count == len(request.ids)
        return request.drafts[: MAX_STEP_TOKENS - row - count] if catches_up else []


def blocks_at_end(request: Request) -> int:
    """The most blocks that a request's sequence can have."""
    return blocks_of(request.end + ROLLBACK)
