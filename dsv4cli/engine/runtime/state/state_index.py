"""Index of the prefix cache's states by the tokens that they begin with. Lookups do not slow down with more states."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.runtime.request import ID_BYTES
from dsv4cli.engine.runtime.state.cache import Snapshot
from dsv4cli.engine.runtime.state.host_tier import Stored

# the number of blocks whose tokens a prompt certainly shares with a state that it hits, a hash of these tokens, and the
# cache scope
Border = tuple[int, int, str]


@dataclass(eq=False)
class KeptState:
    """A state in the prefix cache: a sequence at one length, and packed ids that begin with its tokens.

    Attributes:
        certain: number of its tokens that any prompt that hits it must share.
        border: the number of whole blocks of these tokens, a hash of them, and the cache scope.
        used: when it was last used, as a counter.
    """

    ids: bytearray
    certain: int
    border: Border
    held: Snapshot | Stored
    used: int = 0

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return self.held.length

    @property
    def own_ids(self) -> bytearray:
        """The packed ids of its tokens."""
        return self.ids[: ID_BYTES * self.length]


class StateIndex:
    """The states of one prefix cache, in the order in which they were added."""

    def __init__(self) -> None:
        self._all: dict[KeptState, None] = {}
        self._device: dict[KeptState, None] = {}
        # border -> number of certain tokens -> the certain tokens after the border -> states
        self._at: dict[Border, dict[int, dict[bytes, list[KeptState]]]] = {}

    def __iter__(self) -> Iterator[KeptState]:
        return iter(self._all)

    @property
    def on_device(self) -> list[KeptState]:
        """The states on the device."""
        return list(self._device)

    @property
    def in_host_memory(self) -> list[KeptState]:
        """The states in host memory."""
        return [state for state in self._all if state not in self._device]

    def near(self, border: Border, ids: bytearray) -> list[KeptState]:
        """Return the states of a boundary whose certain tokens, by their hash, are the first of the packed ids."""
        first = ID_BYTES * BLOCK_TOKENS * border[0]
        found: list[KeptState] = []
        for certain, alike in self._at.get(border, {}).items():
            found += alike.get(bytes(ids[first : ID_BYTES * certain]), ())
        return found

    def add(self, state: KeptState) -> None:
        """Add a state."""
        self._all[state] = None
        self._file(state)

    def remove(self, state: KeptState) -> None:
        """Remove a state. It leaves the list first, so that an interruption cannot leave a freed state in it."""
        del self._all[state]
        self._device.pop(state, None)
        by_certain = self._at.get(state.border, {})
        alike = by_certain.get(state.certain, {})
        same = alike.get(_key(state), [])
        if state in same:
            same.remove(state)
        if not same:
            alike.pop(_key(state), None)
        if not alike:
            by_certain.pop(state.certain, None)
        if not by_certain:
            self._at.pop(state.border, None)

    def take_to_host_memory(self, state: KeptState, stored: Stored) -> None:
        """Record that a state is now in host memory."""
        state.held = stored
        del self._device[state]

    def file_again(self) -> None:
        """Rebuild the index, after an interruption."""
        self._at.clear()
        self._device.clear()
        for state in self._all:
            self._file(state)

    def _file(self, state: KeptState) -> None:
        if isinstance(state.held, Snapshot):
            self._device[state] = None
        alike = self._at.setdefault(state.border, {}).setdefault(state.certain, {})
        alike.setdefault(_key(state), []).append(state)


def age_of(state: KeptState) -> tuple[int, int]:
    """Return the eviction order: least recently used first; among equals the longest."""
    return state.used, -state.length


def _key(state: KeptState) -> bytes:
    """Return the certain tokens after the boundary."""
    return bytes(state.ids[ID_BYTES * BLOCK_TOKENS * state.border[0] : ID_BYTES * state.certain])
