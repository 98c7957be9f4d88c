"""Prefix cache: states that earlier requests left, for requests whose prompts begin with the same tokens.

A state is cached where a request asks for it, every `KEPT_EVERY` tokens of a prompt, and where a sequence ends. It is
found by a hash of its tokens up to a block boundary, and used if the tokens themselves are equal and both requests have
the same cache scope. The least recently used state is evicted first: to host memory, if there is any, and from there
for good.
"""

from itertools import chain

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.runtime.request import ID_BYTES, Request
from dsv4cli.engine.runtime.state.cache import Cache, Snapshot
from dsv4cli.engine.runtime.state.host_tier import HostTier, Stored
from dsv4cli.engine.runtime.state.state_index import KeptState, StateIndex, age_of
from dsv4cli.errors import NotEnoughMemory

# prompts are cached at multiples of this many tokens, for prompts that begin with the same document
KEPT_EVERY = 4096
# this few tokens are prefilled again: unrelated prompts share as many
NOT_WORTH = 2


class PrefixCache:
    """The states of finished requests in one cache: up to `most` on the device, and as many as fit in host memory.

    Attributes:
        hits: requests that had a cache hit.
        found: their cached tokens.
    """

    def __init__(self, cache: Cache, most: int, reads_next: bool = False, host: HostTier | None = None) -> None:
        """reads_next: whether a position's state depends on the next token, which may differ in a new request."""
        self.cache = cache
        self.hits = self.found = 0
        self._most = most
        self._again = int(reads_next)
        self._host = host
        self._states = StateIndex()
        self._count = 0
        cache.evict_one = self._evict_one

    @property
    def states(self) -> list[KeptState]:
        """All states, by length."""
        return sorted(self._states, key=lambda state: state.length)

    @property
    def device_bytes(self) -> int:
        """Bytes of the states on the device. Shared blocks count once."""
        held = [state.held for state in self._states.on_device if isinstance(state.held, Snapshot)]
        blocks = len(set(chain.from_iterable(one.blocks for one in held)))
        return len(held) * self.cache.copies.nbytes + blocks * self.cache.block_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the states in host memory."""
        return 0 if self._host is None else self._host.nbytes

    @property
    def unpinned(self) -> NotEnoughMemory | None:
        """Why host memory is not pinned; None if it is."""
        return None if self._host is None else self._host.unpinned

    def prepare(self) -> bool:
        """Prepare host memory for the next states. Return whether anything was missing."""
        return self._host is not None and self._host.prepare()

    def prepare_next(self) -> None:
        """Prepare some host memory while the device computes, for 2 ms at most."""
        if self._host is not None:
            self._host.pin_next()

    def begin(self, request: Request) -> None:
        """Start a request from the longest cached prefix of its prompt, without the prompt's last token.

        If the cache is not bounded, states that the prompt does not extend are dropped. Raises NotEnoughMemory.
        """
        if request.scored:
            return
        assert request.sequence is not None
        # the bits of an answer do not show where its prompt was taken up
        request.sequence.fewest_columns = self.cache.config.sliding_window
        # the second time there may be nothing more to find
        if request.cached and request.cached == len(request.prompt) - 1 - self._again:
            return
        ids = request.pack()
        borders = _borders(ids, request.borders)
        count, found = self._longest(ids, borders, request.cache_scope)
        if found is not None and count > max(request.done, NOT_WORTH):
            self._take(request, found, count, borders)
        if not self.cache.bounded:
            length = len(request.prompt)
            stale = [state for state in self._states if state.length > length or not self._usable(state, ids)]
            for state in stale:
                self._drop(state)

    def stop(self, request: Request) -> int:
        """Return where the request's next chunk ends at the latest, so that a state can be cached there.

        States that would be hardly longer than the cached prefix are skipped.
        """
        least = max(request.done, request.cached + NOT_WORTH)
        stops = [kept for kept in request.keep if kept > least]
        multiple = (request.done // KEPT_EVERY + 1) * KEPT_EVERY
        if multiple < len(request.prompt):
            stops.append(multiple)
        return min([len(request.ids), *stops])

    def kept_at(self, request: Request, end: int) -> bool:
        """Return whether the state is cached where a chunk ends."""
        return end in request.keep or (end % KEPT_EVERY == 0 and end < len(request.prompt))

    def gives(self, request: Request, end: int, other: Request) -> bool:
        """Return whether a state cached at the end of a request's chunk would be a hit for another request."""
        if request.scored or other.scored or end - other.done <= NOT_WORTH or not self.kept_at(request, end):
            return False
        if request.cache_scope != other.cache_scope:
            return False
        return other.pack().startswith(request.pack()[: ID_BYTES * end])

    def keep(self, request: Request) -> None:
        """Keep a request's current state, unless the device has an equivalent one."""
        sequence = request.sequence
        assert sequence is not None
        ids, length = request.pack(), sequence.length
        if request.scored or not length:
            return
        borders = _borders(ids, request.borders)
        certain = min(max(sequence.high - self.cache.rollback + self._again, 0), length)
        border = certain // BLOCK_TOKENS, borders[certain // BLOCK_TOKENS], request.cache_scope
        own = ids[: ID_BYTES * length]
        for same in [state for state in self._states.near(border, ids) if state.own_ids == own]:
            if isinstance(same.held, Snapshot) and same.held.high <= sequence.high:
                self._use(same, borders)
                return
            self._drop(same)
        while len(there := self._states.on_device) >= self._most:
            self._evict(min(there, key=age_of))
        state = KeptState(ids, certain, border, self.cache.snapshot(sequence))
        self._states.add(state)
        self._use(state, borders)

    def recover(self) -> list[Snapshot]:
        """Repair the bookkeeping after an interruption and return the snapshots that are held."""
        self._states.file_again()
        held = [state.held for state in self._states]
        if self._host is not None:
            self._host.recover([one for one in held if isinstance(one, Stored)])
        return [one for one in held if isinstance(one, Snapshot)]

    def forget(self) -> None:
        """Drop every state."""
        for state in list(self._states):
            self._drop(state)
        if not self.cache.bounded:
            self.cache.copies.forget()

    def _take(self, request: Request, state: KeptState, count: int, borders: list[int]) -> None:
        """Restore the first `count` tokens of a state into a request."""
        assert request.sequence is not None
        self._use(state, borders)
        if isinstance(state.held, Snapshot):
            self.cache.restore(request.sequence, state.held)
        else:
            assert self._host is not None
            self._host.restore(request.sequence, state.held)
        self.cache.roll_back(request.sequence, request.sequence.length - count)
        self.hits, self.found = self.hits + (not request.cached), self.found + count - request.cached
        request.done = request.cached = count

    def _longest(self, ids: bytearray, borders: list[int], scope: str) -> tuple[int, KeptState | None]:
        """Return the longest usable prefix of the ids, in tokens, and its state, from the furthest boundary that has
        one.
        """
        for number in range((len(ids) // ID_BYTES - 1) // BLOCK_TOKENS, -1, -1):
            near = self._states.near((number, borders[number], scope), ids)
            there = [(self._usable(state, ids), state) for state in near]
            count, best = max(there, key=lambda one: (one[0], isinstance(one[1].held, Snapshot)), default=(0, None))
            if count:
                return count, best
        return 0, None

    def _usable(self, state: KeptState, ids: bytearray) -> int:
        """Return how many tokens a state shares with the prompt, without its last one; 0 if rolling back cannot
        reach them.
        """
        length, high = state.length, state.held.high
        count = max(shared(state.ids, ids, min(length, len(ids) // ID_BYTES - 1)) - self._again, 0)
        return count if high - count <= self.cache.rollback else 0

    def _use(self, state: KeptState, borders: list[int]) -> None:
        """Mark a state as used, and the shortest state that its tokens begin with."""
        self._count += 1
        state.used = self._count
        for number in range(state.border[0] + 1):
            there = self._states.near((number, borders[number], state.border[2]), state.ids)
            begins = [one for one in there if state.ids.startswith(one.own_ids)]
            if begins:
                min(begins, key=lambda one: one.length).used = self._count
                return

    def _evict_one(self) -> bool:
        """Evict the oldest state whose blocks no other holds, else the oldest. Return whether there was one."""
        there = self._states.on_device
        alone = [state for state in there if isinstance(state.held, Snapshot) and self.cache.frees(state.held)]
        if there:
            self._evict(min(alone or there, key=age_of))
        return bool(there)

    def _evict(self, state: KeptState) -> None:
        """Evict a state from the device."""
        snapshot, host = state.held, self._host
        assert isinstance(snapshot, Snapshot)
        if host is None or not host.could_hold(snapshot):
            self._drop(state)
            return
        stored = [] if host.has_space_for(snapshot) else sorted(self._states.in_host_memory, key=age_of)
        for one in stored:
            self._drop(one)
            if host.has_space_for(snapshot):
                break
        if not host.has_space_for(snapshot):  # pages that are being read back cannot be freed
            self._drop(state)
            return
        self._states.take_to_host_memory(state, host.store(snapshot))
        self.cache.drop(snapshot)

    def _drop(self, state: KeptState) -> None:
        self._states.remove(state)
        if isinstance(state.held, Snapshot):
            self.cache.drop(state.held)
        else:
            assert self._host is not None
            self._host.drop(state.held)


def _borders(ids: bytearray, known: list[int]) -> list[int]:
    """Return a hash of the tokens before each block boundary, from 0 tokens on. `known` holds the first ones and is
    extended.
    """
    known[:] = known or [0]
    size = ID_BYTES * BLOCK_TOKENS
    for number in range(len(known) - 1, len(ids) // size):
        known.append(hash((known[-1], bytes(ids[number * size : (number + 1) * size]))))
    return known


def shared(first: bytearray, second: bytearray, most: int) -> int:
    """Return how many tokens two packed id lists share at the start, up to `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if first[ID_BYTES * low : ID_BYTES * middle] == second[ID_BYTES * low : ID_BYTES * middle]:
            low = middle
        else:
            high = middle - 1
    return low
