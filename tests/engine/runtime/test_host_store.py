"""States in host memory and copies of rings: bit for bit what the sequence had, whoever shares its blocks."""

import threading

import pytest
import torch

from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state import host_tier as host_store
from dsv4cli.engine.runtime.state.cache import Cache, Snapshot
from dsv4cli.engine.runtime.state.host_tier import HostTier
from dsv4cli.engine.system.pinned import PageFaulter
from dsv4cli.errors import NotEnoughMemory
from tests.support.cache_state import same, state
from tests.support.speculation import model_of


def cache(drafter: str = "mtp", blocks: int = 6) -> Cache:
    """A bounded one of two slots."""
    model = model_of(drafter)
    one = Cache(model.config, model.numerics, slots=2)
    one.bound(blocks)
    return one


def write(one: Cache, sequence: Sequence, tokens: int, seed: int) -> None:
    """Has a sequence grow by tokens whose state is anything."""
    one.reserve(sequence, tokens)
    first = sequence.length // 128
    generator = torch.Generator().manual_seed(seed)

    def any_like(data: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, 99, data.shape, generator=generator).to(data.dtype)

    for layer in one.layers:
        for ring in layer.rings():
            ring.data[sequence.slot] = any_like(ring.data[sequence.slot])
        for pool in layer.pools():
            rows = pool.data.unflatten(0, (-1, pool.per_block))
            for block in sequence.blocks[first:]:
                rows[block] = any_like(rows[block])
    one.advance(sequence, tokens)


def held(one: Cache, sequence: Sequence) -> list[torch.Tensor]:
    return [part.clone() for part in state(one, sequence)]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def kept(one: Cache, length: int) -> tuple[Snapshot, list[torch.Tensor]]:
    """The snapshot of a sequence that has ended, and what it had."""
    sequence = one.allocate()
    write(one, sequence, length, length)
    found = one.snapshot(sequence), held(one, sequence)
    one.free(sequence)
    return found


def test_rings_are_copied_piece_by_piece(monkeypatch):
    """A piece is of pages behind each other that were pinned at once."""
    one = cache()
    store = HostTier(one, 10**7)
    size = store._pages.shape[1]
    monkeypatch.setattr(host_store, "PINNED_AT_ONCE", 4 * size + 1)
    flat, first = torch.arange(5 * size + 9) % 251, store._pages.data_ptr()
    flat = flat.to(torch.uint8)
    pieces = list(store._ring_parts([2, 3, 4, 5, 9, 10], flat))
    assert [((ours.data_ptr() - first) // size, len(ours)) for ours, _ in pieces] == [
        (2, 2 * size),
        (4, 2 * size),
        (9, size + 9),
    ]
    assert same(torch.cat([theirs for _, theirs in pieces]), flat)


@pytest.mark.parametrize("drafter", ["mtp", "dspark"])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("length", [1, 128, 300])
def test_all_of_a_state_comes_back(length, place, drafter):
    one = cache(drafter)
    store = HostTier(one, 10**7)
    snapshot, expected = kept(one, length)
    other = one.allocate()
    write(one, other, 200, 7)
    if place == "host":
        stored = store.store(snapshot)
        one.drop(snapshot)
        write(one, other, 300, 8)
        store.restore(other, stored)
        assert equal(held(one, other), expected)
        store.drop(stored)
        assert store.nbytes == 0
    else:
        one.restore(other, snapshot)
        assert equal(held(one, other), expected)
        one.drop(snapshot)
    assert (other.length, other.high) == (length, length)
    one.free(other)
    assert (one.used_blocks, one.free_slots) == (0, 2)


def test_a_slot_remembers_nothing_of_the_one_before():
    one = cache()
    kept(one, 300)
    sequence = one.allocate()
    rings = [(ring, ring.data[sequence.slot]) for layer in one.layers for ring in layer.rings()]
    assert all(torch.equal(data, torch.full_like(data, ring.empty)) for ring, data in rings)
    assert {ring.empty for ring, _ in rings} == {0.0, float("-inf")}


def test_a_block_that_was_written_since_is_copied_again():
    """Its page holds what it held before."""
    one = cache()
    store = HostTier(one, 10**7)
    sequence = one.allocate()
    write(one, sequence, 100, 1)
    early, expected = one.snapshot(sequence), held(one, sequence)
    stored = store.store(early)
    one.drop(early)
    write(one, sequence, 20, 2)  # in the same block
    late, expected_later = one.snapshot(sequence), held(one, sequence)
    stored_later = store.store(late)
    one.drop(late)
    one.free(sequence)
    for found, wanted in ((stored, expected), (stored_later, expected_later)):
        other = one.allocate()
        store.restore(other, found)
        assert equal(held(one, other), wanted)
        one.free(other)


def test_how_far_a_sequence_was_written_comes_back():
    """Its rings hold tokens beyond its length, so that it cannot roll back as far as another one."""
    one = cache()
    store = HostTier(one, 10**7)
    sequence = one.allocate()
    write(one, sequence, 300, 1)
    one.roll_back(sequence, 5)
    snapshot = one.snapshot(sequence)
    stored = store.store(snapshot)
    one.free(sequence)
    other = one.allocate()
    store.restore(other, stored)
    assert (other.length, other.high) == (295, 300)


def test_a_page_that_was_given_back_is_not_shared():
    """Its block on the device has not changed since, but the page may hold another block next."""
    one = cache()
    store = HostTier(one, 10**7)
    first, expected = kept(one, 100)
    second, expected_second = kept(one, 120)
    store.drop(store.store(first))
    stored = store.store(first)
    stored_second = store.store(second)
    assert len({*stored.pages, *stored_second.pages}) == len(stored.pages) + len(stored_second.pages)
    for snapshot in (first, second):
        one.drop(snapshot)
    for found, wanted in ((stored, expected), (stored_second, expected_second)):
        other = one.allocate()
        store.restore(other, found)
        assert equal(held(one, other), wanted)
        one.free(other)


def test_a_snapshot_holds_no_block_beyond_its_length():
    """A sequence may have blocks for tokens that it has not stored, which are its own."""
    one = cache()
    sequence = one.allocate()
    write(one, sequence, 100, 1)
    one.reserve(sequence, 300)
    snapshot = one.snapshot(sequence)
    one.free(sequence)
    assert one.used_blocks == len(snapshot.blocks) == 1


def test_blocks_that_are_known_here_are_not_copied_back():
    """Two sequences that begin with one state share its full blocks until one of them writes."""
    one = cache()
    store = HostTier(one, 10**7)
    snapshot, expected = kept(one, 300)
    stored = store.store(snapshot)
    one.drop(snapshot)
    first, second = one.allocate(), one.allocate()
    store.restore(first, stored)
    store.restore(second, stored)
    assert (first.blocks, one.used_blocks) == (second.blocks, 3)
    write(one, first, 50, 3)
    assert (first.blocks[:2], one.used_blocks) == (second.blocks[:2], 4)
    assert equal(held(one, second), expected)


def test_a_state_that_is_read_back_keeps_its_pages():
    """Where its blocks need room, for which others come to host memory in its place."""
    one = cache(blocks=6)
    snapshot, expected = kept(one, 300)
    pages = 3 + -(-one.copies.nbytes // HostTier(one, 0)._pages.shape[1])
    store = HostTier(one, 2 * pages * HostTier(one, 0)._pages.shape[1])
    stored = store.store(snapshot)
    one.drop(snapshot)
    others = [kept(one, 300)[0] for _ in range(2)]  # all blocks

    def evict_one() -> bool:
        other = others.pop()
        if len(others) == 1:
            store.drop(stored)  # as the one that was used longest ago
        store.store(other)
        one.drop(other)
        return True

    one.evict_one = evict_one
    sequence = one.allocate()
    store.restore(sequence, stored)
    assert equal(held(one, sequence), expected)


def test_states_are_kept_in_memory_that_the_system_does_not_pin(monkeypatch):
    one = cache(blocks=8)
    store, tries = HostTier(one, 200 * one.block_bytes), []

    def refuse(some, remedy):
        tries.append(remedy)
        raise NotEnoughMemory("the system does not pin", remedy)

    monkeypatch.setattr(host_store, "pin", refuse)
    monkeypatch.setattr(store, "_pinned", 0)
    assert store.unpinned is None
    snapshot, expected = kept(one, 300)
    stored = store.store(snapshot)
    one.drop(snapshot)
    assert store.unpinned is not None
    assert tries == ["lower --cache-memory"]
    assert not store.prepare()
    sequence = one.allocate()
    store.restore(sequence, stored)
    assert equal(held(one, sequence), expected)
    assert len(tries) == 1


def test_memory_is_pinned_before_its_use(monkeypatch):
    """As on a GPU: a state for each sequence ahead, and not before the system has given it."""
    one = cache(blocks=8)
    store, pinned = HostTier(one, 200 * one.block_bytes), []
    size, given = store._pages.shape[1], threading.Event()
    ahead = one.slots * (store._ring_pages + 1)
    monkeypatch.setattr(host_store, "pin", lambda some, remedy: pinned.append(len(some)) or 0)
    monkeypatch.setattr(host_store, "PINNED_AT_ONCE", 10 * size)
    monkeypatch.setattr(store, "_pinned", 0)
    populate = PageFaulter._populate
    monkeypatch.setattr(PageFaulter, "_populate", lambda own: (given.wait(60), populate(own)))
    assert [store.prepare() for _ in range(3)] == [True] * 3
    assert pinned == []
    given.set()
    store._populating._thread.join()
    while store.prepare():
        store._populating._thread.join()
    assert pinned == [10] * -(-ahead // 10)
    snapshot, _ = kept(one, 300)
    taken = len(store.store(snapshot).pages)
    while store.pin_next() or store._pinned < store._ahead:  # while a device computes
        store._populating._thread.join()
    assert not store.prepare()
    assert pinned == [10] * -(-(ahead + taken) // 10)
    while store.has_space_for(snapshot):
        store.store(snapshot)
    while store.prepare():
        pass
    assert sum(pinned) == len(store._pages)
    store._addresses.clear()  # nothing to let go of
