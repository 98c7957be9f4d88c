"""What earlier requests have left in a cache: states of sequences, for requests whose prompts begin alike.

A state is kept where a request asks for it, at every so many tokens of a prompt, and where a sequence ends. It is found
by a hash of its tokens up to a block's border, and taken when the tokens themselves are equal. The one that was used
longest ago goes first: to host memory, if there is any, and from there for good.
"""

from itertools import chain

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.runtime.request import ID_BYTES, Request
from dsv4cli.engine.runtime.state.cache import Cache, Snapshot
from dsv4cli.engine.runtime.state.host_tier import HostTier, Stored
from dsv4cli.engine.runtime.state.state_index import KeptState, StateIndex, age_of
from dsv4cli.errors import NotEnoughMemory

# prompts are kept at multiples of so many tokens, for those that begin with the same document
KEPT_EVERY = 4096
# so few tokens are read again: prompts of strangers begin with as many
NOT_WORTH = 2


class PrefixCache:
    """The states of one cache: on the device up to `most`, in host memory as many as have room there.

    hits: requests that have found something; found: tokens that they need not read.
    """

    def __init__(self, cache: Cache, most: int, reads_next: bool = False, host: HostTier | None = None) -> None:
        """reads_next: whether the state of a position depends on the token after it, which may be another now."""
        self.cache = cache
        self.hits = self.found = 0
        self._most = most
        self._again = int(reads_next)
        self._host = host
        self._states = StateIndex()
        self._count = 0
        cache.give_way = self._give_way

    @property
    def states(self) -> list[KeptState]:
        """All of them, by length."""
        return sorted(self._states, key=lambda state: state.length)

    @property
    def device_bytes(self) -> int:
        """What the states on the device take there; blocks that several hold count once."""
        held = [state.held for state in self._states.on_device if isinstance(state.held, Snapshot)]
        blocks = len(set(chain.from_iterable(one.blocks for one in held)))
        return len(held) * self.cache.copies.nbytes + blocks * self.cache.block_bytes

    @property
    def host_bytes(self) -> int:
        """What states take in host memory."""
        return 0 if self._host is None else self._host.nbytes

    @property
    def unpinned(self) -> NotEnoughMemory | None:
        """Why host memory is not pinned, None where it is."""
        return None if self._host is None else self._host.unpinned

    def prepare(self) -> bool:
        """Prepare host memory for the next states. Return whether anything was missing."""
        return self._host is not None and self._host.prepare()

    def prepare_meanwhile(self) -> None:
        """Prepare some of it while the device computes: 2 ms at most."""
        if self._host is not None:
            self._host.pin_next()

    def begin(self, request: Request) -> None:
        """Gives a request, of which nothing more was read, the longest beginning of its prompt that is held, less its
        last token. Without a bound of the cache, states that the prompt does not reach go, and those that have more
        tokens. Raises NotEnoughMemory."""
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
        count, found = self._longest(ids, borders)
        if found is not None and count > max(request.done, NOT_WORTH):
            self._take(request, found, count, borders)
        if not self.cache.bounded:
            length = len(request.prompt)
            stale = [state for state in self._states if state.length > length or not self._usable(state, ids)]
            for state in stale:
                self._drop(state)

    def stop(self, request: Request) -> int:
        """Where the request's next chunk ends at the latest: not where what it has found is nearly as long."""
        least = max(request.done, request.cached + NOT_WORTH)
        stops = [kept for kept in request.keep if kept > least]
        multiple = (request.done // KEPT_EVERY + 1) * KEPT_EVERY
        if multiple < len(request.prompt):
            stops.append(multiple)
        return min([len(request.ids), *stops])

    def kept_at(self, request: Request, end: int) -> bool:
        """Whether the state is kept where a chunk ends."""
        return end in request.keep or (end % KEPT_EVERY == 0 and end < len(request.prompt))

    def gives(self, request: Request, end: int, other: Request) -> bool:
        """Whether what is kept where a chunk of a request ends saves another tokens."""
        if request.scored or other.scored or end - other.done <= NOT_WORTH or not self.kept_at(request, end):
            return False
        return other.pack().startswith(request.pack()[: ID_BYTES * end])

    def keep(self, request: Request) -> None:
        """Keeps the state of a request as it is now, if the device has none of the same tokens that is as good."""
        sequence = request.sequence
        assert sequence is not None
        ids, length = request.pack(), sequence.length
        if request.scored or not length:
            return
        borders = _borders(ids, request.borders)
        certain = min(max(sequence.high - self.cache.rollback + self._again, 0), length)
        border = certain // BLOCK_TOKENS, borders[certain // BLOCK_TOKENS]
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
        """Puts in order what an interruption has left; the snapshots that are held."""
        self._states.file_again()
        held = [state.held for state in self._states]
        if self._host is not None:
            self._host.recover([one for one in held if isinstance(one, Stored)])
        return [one for one in held if isinstance(one, Snapshot)]

    def forget(self) -> None:
        """Gives everything back."""
        for state in list(self._states):
            self._drop(state)
        if not self.cache.bounded:
            self.cache.copies.forget()

    def _take(self, request: Request, state: KeptState, count: int, borders: list[int]) -> None:
        """Gives a request the first `count` tokens of a state."""
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

    def _longest(self, ids: bytearray, borders: list[int]) -> tuple[int, KeptState | None]:
        """How many of the ids a state holds, and the state: of those filed under the furthest border that has one."""
        for number in range((len(ids) // ID_BYTES - 1) // BLOCK_TOKENS, -1, -1):
            there = [(self._usable(state, ids), state) for state in self._states.near((number, borders[number]), ids)]
            count, best = max(there, key=lambda one: (one[0], isinstance(one[1].held, Snapshot)), default=(0, None))
            if count:
                return count, best
        return 0, None

    def _usable(self, state: KeptState, ids: bytearray) -> int:
        """How many tokens a state shares with the prompt, less its last one; 0 where rolling back does not reach
        them."""
        length, high = state.length, state.held.high
        count = max(shared(state.ids, ids, min(length, len(ids) // ID_BYTES - 1)) - self._again, 0)
        return count if high - count <= self.cache.rollback else 0

    def _use(self, state: KeptState, borders: list[int]) -> None:
        """Notes the use of a state, and of the shortest that its tokens begin with."""
        self._count += 1
        state.used = self._count
        for number in range(state.border[0] + 1):
            there = self._states.near((number, borders[number]), state.ids)
            begins = [one for one in there if state.ids.startswith(one.own_ids)]
            if begins:
                min(begins, key=lambda one: one.length).used = self._count
                return

    def _give_way(self) -> bool:
        """Evicts the oldest state whose blocks nobody else holds, or the oldest; whether there was one."""
        there = self._states.on_device
        alone = [state for state in there if isinstance(state.held, Snapshot) and self.cache.frees(state.held)]
        if there:
            self._evict(min(alone or there, key=age_of))
        return bool(there)

    def _evict(self, state: KeptState) -> None:
        """Takes a state from the device."""
        snapshot, host = state.held, self._host
        assert isinstance(snapshot, Snapshot)
        if host is None or not host.could_hold(snapshot):
            self._drop(state)
            return
        stored = [] if host.has_room_for(snapshot) else sorted(self._states.in_host_memory, key=age_of)
        for one in stored:
            self._drop(one)
            if host.has_room_for(snapshot):
                break
        if not host.has_room_for(snapshot):  # what is being read back keeps its pages
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
    """A hash of the tokens before each border of a block, from that of none on; `known` begins it and takes it all."""
    known[:] = known or [0]
    size = ID_BYTES * BLOCK_TOKENS
    for number in range(len(known) - 1, len(ids) // size):
        known.append(hash((known[-1], bytes(ids[number * size : (number + 1) * size]))))
    return known


def shared(first: bytearray, second: bytearray, most: int) -> int:
    """How many tokens packed ids both begin with, at most `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if first[ID_BYTES * low : ID_BYTES * middle] == second[ID_BYTES * low : ID_BYTES * middle]:
            low = middle
        else:
            high = middle - 1
    return low
