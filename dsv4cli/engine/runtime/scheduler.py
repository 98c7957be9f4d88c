"""Admits requests and splits each step into chunks, one per request."""

from collections import deque

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, MAX_STEP_TOKENS, ROLLBACK
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.cache import Cache, blocks_of
from dsv4cli.engine.runtime.state.prefix_cache import PrefixCache
from dsv4cli.engine.runtime.step import Chunk, StepChoice
from dsv4cli.engine.runtime.step_sizes import rows_needed


class Scheduler:
    """The queued and running requests of one cache, in order of arrival."""

    def __init__(self, cache: Cache, prefixes: PrefixCache | None = None, blocks: int | None = None) -> None:
        """Args:
        blocks: the cache blocks that all sequences may use together; None for no limit.
        """
        self._cache, self._prefixes, self._blocks = cache, prefixes, blocks
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._waiting or self._active)

    @property
    def active(self) -> list[Request]:
        """The admitted requests, in the order of their chunks."""
        return list(self._active)

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        return len(self._waiting)

    @property
    def joins(self) -> bool:
        """Whether the next step admits a queued request."""
        return bool(self._waiting) and self._cache.free_slots > 0 and self._fits(self._waiting[0])

    @property
    def max_request_tokens(self) -> int | None:
        """The largest number of tokens of a prompt and its completion; None if only memory bounds it."""
        return None if self._blocks is None else self._blocks * BLOCK_TOKENS - ROLLBACK

    def add(self, request: Request) -> None:
        """Queue a request of at least one token. One that has a sequence is admitted at once."""
        (self._waiting if request.sequence is None else self._active).append(request)
        self.admit()

    def admit(self) -> None:
        """Admit queued requests in order of arrival while the longest completion of each fits."""
        while self.joins:
            request = self._waiting.popleft()
            request.sequence = self._cache.allocate()
            self._active.append(request)
            if self._prefixes is not None:
                self._prefixes.begin(request)

    def remove(self, request: Request) -> bool:
        """Remove a request and return whether it was there. Its sequence is not freed."""
        for queue in (self._waiting, self._active):
            if request in queue:
                queue.remove(request)
                return True
        return False

    def clear(self) -> None:
        """Remove every request. Their sequences are not freed."""
        self._waiting.clear()
        self._active.clear()

    def of(self, pick: StepChoice | None) -> list[Request]:
        """Return the requests that may share the next step, in the order of their chunks."""
        if pick is None:
            return self.active
        if not pick.requests:
            return [request for request in self._active if request.decodes]
        active = {request.number: request for request in self._active}
        return [active[number] for number in (*pick.decoding, *pick.requests)]

    def chunks(self, pick: StepChoice | None = None) -> list[Chunk]:
        """Return the chunks of the next step. A chunk ends at the latest where the prefix cache keeps the state."""
        self.admit()
        chunks: list[Chunk] = []
        picked = pick or StepChoice()
        row, most = 0, min(picked.tokens or MAX_STEP_TOKENS, MAX_STEP_TOKENS)
        for place, request in enumerate(self.of(pick)):
            count = min(self._stop(request) - request.done, request.prefill_chunk)
            others = picked.tokens and place > len(picked.decoding)
            if others and not self._joins(request, count, chunks, min(most, picked.shared or most)):
                continue
            count = min(count, most - row)
            if count > 0:
                chunk = Chunk(request, request.done, request.done + count, row, self._drafts(request, count, row))
                chunks.append(chunk)
                row += chunk.tokens
        return chunks

    def _joins(self, request: Request, count: int, chunks: list[Chunk], most: int) -> bool:
        """Return whether `count` tokens of a prompt fit beside these chunks.

        They must fit whole, and no chunk may be about to keep a prefix of this prompt: it is a cache hit in the next
        step.
        """
        if rows_needed([*(chunk.tokens for chunk in chunks), count]) > most:
            return False
        return self._prefixes is None or not any(
            self._prefixes.gives(chunk.request, chunk.end, request) for chunk in chunks
        )

    def _fits(self, request: Request) -> bool:
        taken = sum(blocks_at_end(one) for one in self._active)
        return self._blocks is None or taken + blocks_at_end(request) <= self._blocks

    def _stop(self, request: Request) -> int:
        """Return where the request's next chunk must end.

        The prefix cache is searched again before the first chunk: others may have added the prefix since.
        """
        if self._prefixes is None:
            return len(request.ids)
        if request.done == request.cached:
            self._prefixes.begin(request)
        return self._prefixes.stop(request)

    def _drafts(self, request: Request, count: int, row: int) -> list[int]:
        """Return the draft tokens that follow the next `count` tokens, if these reach the newest token."""
        catches_up = request.done + count == len(request.ids)
        return request.drafts[: MAX_STEP_TOKENS - row - count] if catches_up else []


def blocks_at_end(request: Request) -> int:
    """Return the maximum number of cache blocks that a request's sequence can use."""
    return blocks_of(request.end + ROLLBACK)
