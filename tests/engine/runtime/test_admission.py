"""Requests come, end and are cancelled at random in a cache that is too small for them: all answers are right, nothing
is lost, nothing stays."""

from random import Random

import pytest

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, ROLLBACK
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import Follower
from dsv4cli.engine.runtime.pacing import pacer
from dsv4cli.engine.runtime.state import capacity, prefix_cache
from dsv4cli.engine.runtime.state.cache import FEWEST_BLOCKS
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting
from dsv4cli.errors import NotEnoughMemory, UsageError
from tests.engine.runtime.test_bursts import largest_riding
from tests.engine.runtime.test_reuse import alone, answers, asked, check_empty
from tests.engine.runtime.test_speculation_ranks import Meeting, same
from tests.support.small_model import model
from tests.support.speculation import always_draft, model_of, text

SLOW = pytest.mark.slow


def memory(blocks: int, states: int) -> int:
    """Bytes for so many blocks, and for so many states in the part of it that is theirs."""
    cache = runner.Cache(model_of("mtp").config, model_of("mtp").numerics)
    nbytes = capacity.KEPT_PART * states * cache.copies.nbytes
    assert nbytes >= blocks * cache.block_bytes + states * cache.copies.nbytes
    return nbytes


@pytest.fixture
def few_blocks(monkeypatch):
    """Has a cache of so many blocks, whatever its memory."""

    def chosen(blocks: int) -> None:
        bound = runner.Cache.bound
        monkeypatch.setattr(runner.Cache, "bound", lambda cache, _: bound(cache, blocks))

    return chosen


def test_a_request_waits_until_it_has_room_for_all_its_tokens(few_blocks):
    few_blocks(6)
    one = Engine(model_of("mtp"), Capacity(4, cache_memory=memory(6, 4)), "cpu")
    assert one.max_request_tokens == 6 * BLOCK_TOKENS - ROLLBACK
    # of 6 blocks: 3, 2, then 2 that wait, and 1 that does not overtake
    requests = [asked(text(length, length), tokens) for length, tokens in ((250, 9), (130, 9), (120, 8), (5, 9))]
    for request in requests:
        one.add(request)
    one.step()
    assert [request.sequence is not None for request in requests] == [True, True, False, False]
    assert (one.usage.running, one.usage.waiting) == (2, 2)
    one.cancel(requests[1])
    one.step()
    assert [request.sequence is not None for request in requests] == [True, False, True, True]
    one.cancel(requests[3])
    while one.busy:
        one.step()
    for request in (requests[0], requests[2]):
        expected = alone("mtp", tuple(request.prompt), len(request.ids) - len(request.prompt))
        assert request.ids[len(request.prompt) :] == [token.id for token in expected]
    check_empty(one)


def test_what_can_never_fit_is_refused_with_both_numbers(few_blocks):
    few_blocks(8)
    one = Engine(model_of("mtp"), Capacity(4, cache_memory=memory(8, 4)), "cpu")
    one.add(asked(text(1000, 1), 16))
    with pytest.raises(UsageError, match="has 1,000 tokens and its answer may have 17: the cache holds 1,016"):
        one.add(asked(text(1000, 1), 17))
    one.cancel(one.runner.scheduler.active[0])
    check_empty(one)


def test_a_memory_that_is_too_small_says_how_much_it_needs():
    with pytest.raises(NotEnoughMemory, match="is too small for one conversation") as caught:
        Engine(model_of("mtp"), Capacity(cache_memory=10**5), "cpu")
    least = float(caught.value.remedy.split()[-1].removesuffix("MB"))
    cache = Engine(model_of("mtp"), Capacity(cache_memory=round(least * 1e6)), "cpu").runner.cache
    fewest = cache.copies.nbytes + FEWEST_BLOCKS * cache.block_bytes
    Engine(model_of("mtp"), Capacity(cache_memory=fewest), "cpu")
    with pytest.raises(NotEnoughMemory, match="is too small for one conversation"):
        Engine(model_of("mtp"), Capacity(cache_memory=fewest - 1), "cpu")


def test_a_model_of_window_layers_has_states_too():
    """Its blocks hold nothing."""
    one = Engine(model((0,)), Capacity(2, cache_memory=10**7, host_memory=10**6), "cpu")
    begin = text(300, 1)
    for ids, cached in ((begin, 0), ([*begin, 4, 5], 300), ([*begin, 9], 300)):
        request = asked(ids, 3, keep=(300,))
        answers(one, request)
        assert request.cached == cached
        plain = asked(ids, 3)
        answers(Engine(model((0,)), Capacity(), "cpu"), plain)
        assert request.ids == plain.ids
        while one.runner.prefixes._evict_one():
            pass
    assert one.usage.host_bytes > 0
    check_empty(one)


def test_states_give_way_to_running_requests(few_blocks):
    few_blocks(6)
    one = Engine(model_of("mtp"), Capacity(2, cache_memory=memory(6, 8), host_memory=10**6), "cpu")
    for number in range(5):
        one.add(asked(text(200, number), 2))
        while one.busy:
            one.step()
    assert one.usage.blocks <= 6
    assert one.usage.host_bytes > 0
    whole = asked(text(700, 9), 5)
    one.add(whole)
    while one.busy:
        one.step()
    assert [*whole.ids[700:]] == [token.id for token in alone("mtp", tuple(whole.prompt), 5)]
    check_empty(one)


class Play:
    """Requests at random, some of which begin with others; and what became of them."""

    def __init__(self, one: Engine, seed: int) -> None:
        self.one, self.random, self.live, self.done, self.ended = one, Random(seed), [], [], []
        self.texts = [text(600, number) for number in range(3)]
        self.cancelled = 0

    def move(self) -> None:
        """Adds, steps, cancels or forgets."""
        chance = self.random.random()
        if chance < 0.18:
            self.add()
        elif chance < 0.24 and self.live:
            request = self.live.pop(self.random.randrange(len(self.live)))
            self.one.cancel(request)
            self.cancelled += 1
            self.ended.append(request)
        elif chance < 0.245:
            self.one.forget()
            self.live.clear()
        elif self.one.busy:
            self.step()

    def add(self) -> None:
        """A prompt that begins with a text, or with what another request has got."""
        if self.done and self.random.random() < 0.4:
            ids = self.random.choice(self.done).ids
            ids = ids[: self.random.choice((len(ids), len(ids) - self.random.randrange(12)))][:600]
        else:
            ids = self.random.choice(self.texts)[: self.random.choice((20, 127, 128, 129, 256, 300, 513))]
        ids = ids + text(self.random.randrange(1, 30), self.random.randrange(50))
        keep = tuple(sorted(self.random.sample(range(1, len(ids) + 1), min(len(ids), self.random.randrange(3)))))
        chunk = self.random.choice((64, 200, 4096))
        request = asked(ids, self.random.randrange(1, 12), keep=keep, prefill_chunk=chunk)
        self.one.add(request)
        self.live.append(request)

    def step(self) -> None:
        """One step."""
        for result in self.one.step():
            if result.tokens and result.tokens[-1].finish:
                self.live.remove(result.request)
                self.done.append(result.request)
                self.ended.append(result.request)

    def end(self) -> None:
        """Everything ends by itself; what requests have got is what they get in an engine that keeps nothing."""
        while self.one.busy:
            self.step()
        assert not self.live
        again = [asked(request.prompt, request.limits.max_tokens) for request in self.ended]
        answers(Engine(model_of("mtp"), Capacity(64), "cpu"), *again)
        for request, expected in zip(self.ended, again, strict=True):
            assert request.ids == expected.ids[: len(request.ids)]
            assert len(request.ids) == len(expected.ids) or request not in self.done
        usage = self.one.usage
        assert (usage.running, usage.waiting, usage.slots) == (0, 0, 0)
        check_empty(self.one)


@pytest.mark.parametrize(
    ("seed", "most", "captured"),
    [
        (1, 0, True),
        *(pytest.param(seed, most, way, marks=SLOW) for seed in (2, 3) for most in (0, 3) for way in (0, 1)),
    ],
)
def test_at_random(seed, most, captured, few_blocks, monkeypatch):
    """A few hundred moves; steps have a target, so that prompts and answers alternate."""
    monkeypatch.setattr(runner, "captures", lambda device: captured)
    monkeypatch.setattr(prefix_cache, "KEPT_EVERY", 100)
    always_draft(monkeypatch)
    few_blocks(14)
    capacity = Capacity(4, 700, cache_memory=memory(14, 6), host_memory=6 * 10**5)
    play = Play(Engine(model_of("mtp"), capacity, "cpu", drafting=Drafting(most), step_ms=30), seed)
    for _ in range(50 if seed == 1 else 400):
        play.move()
    assert play.one.usage.hits > 1
    assert play.cancelled > 1
    play.end()


@pytest.mark.parametrize("drafting", [0, pytest.param(3, marks=SLOW)])
def test_followers_do_the_same(drafting, few_blocks, monkeypatch):
    """Whatever their clocks say: what is kept, found, evicted and read back is the same on every rank."""
    meeting = Meeting()
    monkeypatch.setattr(World, "broadcast_from_leader", lambda world, x: meeting.broadcast(x))
    monkeypatch.setattr(runner, "captures", lambda device: True)
    monkeypatch.setattr(prefix_cache, "KEPT_EVERY", 100)
    always_draft(monkeypatch)
    few_blocks(14)
    capacity = Capacity(4, 700, cache_memory=memory(14, 6), host_memory=6 * 10**5)
    one = Engine(model_of("mtp"), capacity, "cpu", meeting, Drafting(drafting), step_ms=30)
    one._pacer._shared_rows = None  # as on a GPU
    monkeypatch.setattr(pacer.Pacer, "_best", largest_riding)
    one._pacer._sequences = 5  # all that run, and a prompt
    play, other, picks = Play(one, 5), Follower(model_of("mtp"), "cpu"), []
    clock = iter(range(10**6))
    monkeypatch.setattr(pacer, "perf_counter", lambda: next(clock) * 0.01)
    for _ in range(40):
        play.move()
        one._orders.send_orders()  # what it would tell with the next step
        picks += [given["pick"] for name, given in meeting.orders if name == "step"]
        meeting.follow(other)
        assert same(one.runner, other.runner)
        ours, theirs = one.runner.prefixes, other.runner.prefixes
        assert [described(state) for state in ours.states] == [described(state) for state in theirs.states]
        assert ours.host_bytes == theirs.host_bytes
    assert {pick and not pick["requests"] for pick in picks} == {None, True, False}
    assert any(pick and len(pick["requests"]) > 1 for pick in picks)
    assert any(pick and pick["decoding"] for pick in picks)


def described(state: prefix_cache.KeptState) -> tuple:
    """What of a state may be compared."""
    return state.length, state.used, state.own_ids, type(state.held)
