"""How far back a conversation's state can be used: what rolling back reaches, no token less and none more."""

from dataclasses import replace

import pytest

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state import prefix_cache
from dsv4cli.engine.runtime.state.cache import Cache, Snapshot
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.state.host_tier import HostTier
from dsv4cli.engine.runtime.state.prefix_cache import PrefixCache
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tests.support.slow import slow
from tests.support.speculation import model_of


@pytest.mark.parametrize("again", [0, 1])
@pytest.mark.parametrize(("back", "found"), [(ROLLBACK, 30 - ROLLBACK), (ROLLBACK + 1, 0)])
def test_as_far_back_as_the_rings_hold(back, found, again):
    """again: of tokens that are held, how many are read once more."""
    back -= again
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    prefixes = PrefixCache(cache, 16, bool(again))
    ids = list(range(30))
    first = Request(ids, Sampling(), Limits(), sequence=cache.allocate())
    prefixes.begin(first)
    assert first.done == first.cached == 0
    cache.advance(first.sequence, 30)
    prefixes.keep(first)
    # the last token of a prompt is not taken from what is held
    begun = Request([*ids[: 30 - back], 99], Sampling(), Limits(), sequence=cache.allocate())
    prefixes.begin(begun)
    assert (begun.done, begun.cached, begun.sequence.length) == (found, found, found)
    whole = Request(ids[: 30 - ROLLBACK], Sampling(), Limits(), sequence=begun.sequence)
    prefixes.begin(whole)  # its last token is read, so that one less is held
    assert whole.cached == 0


@pytest.mark.parametrize(("drafter", "again"), [("mtp", 1), ("dspark", 0)])
def test_a_drafter_that_reads_the_token_behind_a_position_reads_the_last_one_again(drafter, again):
    """What follows the tokens that two prompts share is another token now."""
    one = Engine(model_of(drafter), Capacity(snapshots=2), "cpu", drafting=Drafting(3))
    ids = list(range(3, 33))
    first = Request(ids, Sampling(0.0), Limits(1), keep=(30,))
    one.add(first)
    one.step()
    other = (first.ids[30] + 1) % 128
    begun = Request([*ids, other, 5], Sampling(0.0), Limits(1))
    one.add(begun)
    assert begun.done == 30 - again


def keep(prefixes: PrefixCache, ids: list[int], scope: str = "") -> Request:
    """Has a request keep the state of all its tokens, and end."""
    cache = prefixes.cache
    request = Request(ids, Sampling(), Limits(), cache_scope=scope, sequence=cache.allocate())
    prefixes.begin(request)
    cache.reserve(request.sequence, len(ids) - request.done)
    cache.advance(request.sequence, len(ids) - request.done)
    prefixes.keep(request)
    cache.free(request.sequence)
    return request


def lengths_on_device(prefixes: PrefixCache) -> list[int]:
    """Of the states there, by length."""
    return [state.length for state in prefixes.states if isinstance(state.held, Snapshot)]


@pytest.mark.parametrize("bytes_of_host", [0, 10**7])
def test_the_one_that_was_used_longest_ago_goes_first(bytes_of_host):
    """And the beginning that others have in common is used with each of them."""
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    cache.bound(40)
    host = HostTier(cache, bytes_of_host) if bytes_of_host else None
    prefixes = PrefixCache(cache, 3, host=host)
    ids = list(range(400))
    keep(prefixes, ids[:200])
    keep(prefixes, ids[:300])
    keep(prefixes, [9] * 250)
    keep(prefixes, ids[:350])
    assert lengths_on_device(prefixes) == [200, 300, 350]
    assert keep(prefixes, [9] * 251).cached == (250 if host else 0)
    assert lengths_on_device(prefixes) == [200, 251, 350]
    prefixes.forget()
    assert (cache.used_blocks, prefixes.device_bytes, prefixes.host_bytes) == (0, 0, 0)


def test_a_state_that_is_there_is_not_copied_again():
    """Unless the new one can be used for more: it never was as long as the one that is there."""
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    cache.bound(40)
    prefixes = PrefixCache(cache, 8)
    ids = list(range(200))
    keep(prefixes, ids)
    [first] = prefixes.states
    keep(prefixes, ids)
    assert prefixes.states == [first]
    keep(prefixes, [9] * 200)
    first.held = replace(first.held, high=200 + ROLLBACK)  # drafts were behind it: nobody begins with all of it
    keep(prefixes, ids)
    assert [state.held.high for state in prefixes.states] == [200, 200]
    assert first not in prefixes.states
    for tokens in (ids, [9] * 200):  # the newest is that which was kept last
        read = Request(tokens, Sampling(), Limits(), sequence=cache.allocate())
        cache.reserve(read.sequence, 200)
        cache.advance(read.sequence, 200)
        prefixes.keep(read)
        cache.free(read.sequence)
        assert max(prefixes.states, key=lambda state: state.used).own_ids == read.pack()
    assert len(prefixes.states) == 2


def test_what_has_found_all_but_its_last_token_is_not_looked_up_again(monkeypatch):
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    prefixes = PrefixCache(cache, 8)
    ids = list(range(20))
    keep(prefixes, ids)
    request = Request(ids, Sampling(), Limits(), sequence=cache.allocate())
    prefixes.begin(request)
    assert request.cached == 19
    monkeypatch.setattr(prefixes, "_longest", None)
    prefixes.begin(request)
    assert request.cached == 19


def test_where_blocks_are_needed_the_oldest_that_frees_one_goes():
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    cache.bound(6)
    prefixes = PrefixCache(cache, 8)
    for number, tokens in enumerate((129, 130, 131)):
        keep(prefixes, [number] * tokens)
    running = cache.allocate()
    cache.restore(running, next(state.held for state in prefixes.states if state.length == 129))
    cache.reserve(running, 200)  # a block of its own in the place of the shared one, and one more
    assert lengths_on_device(prefixes) == [129, 131]


def test_tokens_are_compared_and_no_hash_is_trusted(monkeypatch):
    monkeypatch.setattr(prefix_cache, "hash", lambda _: 7, raising=False)
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    cache.bound(40)
    prefixes = PrefixCache(cache, 8)
    for number in range(3):
        keep(prefixes, [number] * 300)
    for number in range(3):
        assert keep(prefixes, [*[number] * 300, 9]).cached == 300
    assert keep(prefixes, [5] * 301).cached == 0


@pytest.mark.parametrize("bytes_of_host", [0, 10**7])
@pytest.mark.parametrize("tokens", [20, 300])
def test_a_state_is_found_in_its_own_scope_only(monkeypatch, tokens, bytes_of_host):
    """Not even where hashes collide, and not in host memory; each scope has its own state of the same tokens."""
    monkeypatch.setattr(prefix_cache, "hash", lambda _: 7, raising=False)
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    cache.bound(40)
    prefixes = PrefixCache(
        cache, 1 if bytes_of_host else 8, host=HostTier(cache, bytes_of_host) if bytes_of_host else None
    )
    ids = list(range(tokens))
    for scope in ("a", "b", ""):
        assert keep(prefixes, ids, scope).cached == 0
    assert len(prefixes.states) == 3
    for scope in ("", "b", "a"):
        assert keep(prefixes, [*ids, 9], scope).cached == tokens
    assert keep(prefixes, [*ids, 9], "c").cached == 0


def test_a_request_does_not_wait_for_a_state_of_another_scope():
    prefixes = PrefixCache(Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2), 2)
    ids = list(range(200))
    first, same, other = (
        Request(ids, Sampling(), Limits(), keep=(100,), cache_scope=scope) for scope in ("a", "a", "b")
    )
    assert prefixes.gives(first, 100, same)
    assert not prefixes.gives(first, 100, other)


def test_a_stranger_is_not_used_with_a_state():
    """Those of few tokens are all filed at one border."""
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    prefixes = PrefixCache(cache, 2)
    cache.bound(40)
    for number, tokens in enumerate((20, 50, 60)):
        keep(prefixes, [number] * tokens)
    assert lengths_on_device(prefixes) == [50, 60]


@pytest.mark.parametrize("bytes_of_host", [*slow(0), 10**8])
def test_what_strangers_have_left_costs_a_request_nothing(monkeypatch, bytes_of_host):
    """A server holds thousands of states; those of few tokens are all of one border."""
    cache = Cache(parse_config(TINY, "test"), Numerics.plain(), slots=2)
    cache.bound(400)
    host = HostTier(cache, bytes_of_host) if bytes_of_host else None
    prefixes = PrefixCache(cache, 100, host=host)
    for number in range(300):
        keep(prefixes, [number, *range(20 + number % 60)])
    assert len(prefixes.states) > 150 if host else len(prefixes.states) == 100
    compared = []
    shared = prefix_cache.shared
    monkeypatch.setattr(prefix_cache, "shared", lambda *given: compared.append(given) or shared(*given))
    assert keep(prefixes, [299, *range(20 + 299 % 60), 7, 8]).cached == 21 + 299 % 60
    assert len(compared) == 1
    assert keep(prefixes, [301, *range(50)]).cached == 0
    assert len(compared) == 1
