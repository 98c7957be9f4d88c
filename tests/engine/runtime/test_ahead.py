"""Steps that run before the one before was read give what steps give that are read one by one, and leave its state."""

from weakref import ref

import pytest

from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.drafts.draft_controller import DraftController
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import Follower
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.leader_step import LeaderStep
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.state.host_tier import HostTier
from dsv4cli.engine.runtime.step_ahead import StepAhead
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tests.engine.runtime.test_speculation import Divided, Script
from tests.engine.runtime.test_speculation_ranks import Meeting
from tests.engine.runtime.test_speculation_ranks import same as same_ranks
from tests.support.cache_state import same
from tests.support.speculation import model_of, text

WARM = Sampling(0.9, 0.95, 3)
LENGTHS = (5, 126, 40, 60)


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """As on a GPU, but for the graphs."""
    monkeypatch.setattr(runner, "captures", lambda device: True)


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """How many sequences each step had that was launched ahead."""
    sizes, launch = [], StepAhead.launch

    def counted(ahead, ran, tokens):
        sizes.append(len(ran.ready))
        launch(ahead, ran, tokens)

    monkeypatch.setattr(StepAhead, "launch", counted)
    return sizes


@pytest.fixture(params=["off", pytest.param("closed", marks=pytest.mark.slow)])
def drafting(request, monkeypatch) -> Drafting:
    """No drafter, or one that takes in every step and drafts nothing."""
    monkeypatch.setattr(DraftController, "count", lambda gate, sequences: 0)
    return Drafting(0 if request.param == "off" else 3)


def asked(number: int, tokens: int = 12, **given) -> Request:
    return Request(text(LENGTHS[number], number), WARM.plus(number), Limits(tokens), **{"stop_ids": (), **given})


def engine(drafting: Drafting | None = None, **capacity) -> Engine:
    capacity = Capacity(**{"slots": 3, "longest": 300, **capacity})
    return Engine(model_of("mtp"), capacity, "cpu", drafting=drafting or Drafting(0))


def played(one: Engine, requests: list[Request], between=lambda step: None) -> list[list[int]]:
    """The answers; the last request comes after three steps."""
    for request in requests[:-1]:
        one.add(request)
    step = 0
    while one.busy:
        one.step()
        step += 1
        if step == 3:
            one.add(requests[-1])
        between(step)
    return [request.ids[len(request.prompt) :] for request in requests]


def read_one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(StepAhead, "follows", lambda ahead, ran: False)


def test_every_decoding_step_but_the_first_is_launched_ahead(launched, drafting):
    one = engine(drafting)
    one.add(asked(0, 8))
    steps = 0
    while one.busy:
        [result] = one.step()
        steps += 1
        assert len(result.tokens) == 1
    # the prompt, the step that is captured, and six more
    assert (steps, launched) == (8, [1] * 6)
    assert not one.runner.ahead.launched


def test_host_memory_is_pinned_while_a_step_computes(launched, monkeypatch):
    """Behind what was launched, for then the host has time."""
    seen = []
    monkeypatch.setattr(HostTier, "pin_next", lambda store: seen.append(len(launched)))
    one = engine(cache_memory=10**7, host_memory=10**7)
    one.add(asked(0, 8))
    while one.busy:
        one.step()
    assert seen == [*range(1, 7)]


def test_requests_join_end_and_are_cancelled(launched, drafting, monkeypatch):
    """One ends at a token that is drawn, one at its limit, one is cancelled, one comes later, one of them waits."""
    free = played(engine(drafting), [asked(number) for number in range(4)])
    stop = free[1][5]

    def answers() -> list[list[int]]:
        requests = [asked(0), asked(1, stop_ids=(stop,)), asked(2), asked(3, 20)]
        one = engine(drafting)
        found = played(one, requests, lambda step: one.cancel(requests[2]) if step == 6 else None)
        cache = one.runner.cache
        # the padding's
        assert (cache.free_slots, cache.used_blocks) == (cache.slots - 1, 1)
        return found

    found, count = answers(), len(launched)
    read_one_by_one(monkeypatch)
    assert answers() == found
    assert found[1] == free[1][: free[1].index(stop) + 1]
    assert len(launched) == count > 12
    assert {1, 2, 3} >= set(launched) > {1}


def test_a_constraint_decides_behind_what_was_drawn(launched, monkeypatch):
    """Tokens that it forces, bans, or takes in place of what was drawn, when the step after it runs already."""
    back, take_back = [], StepAhead.take_back
    monkeypatch.setattr(StepAhead, "take_back", lambda ahead, one: (back.append(ahead.launched), take_back(ahead, one)))
    free = played(engine(), [asked(number) for number in range(3)])
    back.clear()

    def answers() -> list[list[int]]:
        rules = [Script(instead={(3, free[0][3]): 9}), Script(forced={4: 9}), Script(banned={2: [free[2][2]]})]
        return played(engine(), [asked(number, constraint=rules[number]) for number in range(3)])

    found = answers()
    assert any(back)
    assert all(ours != theirs for ours, theirs in zip(found, free, strict=True))
    launched.clear()
    read_one_by_one(monkeypatch)
    assert answers() == found
    assert not launched


def test_a_mask_decides_before_the_next_step_is_launched(launched, monkeypatch):
    """Nothing is taken back: what the step after it begins with was drawn under the mask."""
    back = []
    monkeypatch.setattr(LeaderStep, "_take_back", lambda *_: back.append(True))

    def answers(*rules) -> list[list[int]]:
        return played(engine(), [asked(number, constraint=rule) for number, rule in enumerate(rules)])

    found = answers(Divided(2), None, Divided(0))
    assert len(launched) > 9
    assert not back
    free = answers(None, None, None)
    assert [ours == theirs for ours, theirs in zip(found, free, strict=True)] == [False, True, False]
    read_one_by_one(monkeypatch)
    assert answers(Divided(2), None, Divided(0)) == found


def test_logprobs_are_those_of_the_tokens_own_step(monkeypatch):
    def tokens() -> list:
        rule = Script(instead={(5, token): 9 for token in range(128)})
        request = Request(text(9, 1), WARM, Limits(10, logprobs=2), rule, stop_ids=())
        one, found = engine(), []
        one.add(request)
        while one.busy:
            found += one.step()[0].tokens
        return [(token.id, token.logprob, token.top) for token in found]

    found = tokens()
    read_one_by_one(monkeypatch)
    assert tokens() == found


# of each turn: how many tokens of the one before go, and how many new ones come
TURNS = ((0, 0), (3, 5), (9, 2), (0, 1))


def test_a_prefix_cache_keeps_what_was_read(launched, drafting, monkeypatch):
    """Turns that end at a token that is drawn, or are broken off: the state is that of steps read one by one."""

    def turns() -> list:
        one, ids, found = engine(drafting, slots=1, snapshots=6), text(125, 5), []
        for number, (less, more) in enumerate(TURNS):
            ids = ids[: len(ids) - less] + text(more, 60 + number)
            keep = (len(ids) // 2, len(ids))
            request = Request(ids, WARM.plus(number), Limits(12), keep=keep, stop_ids=tuple(range(10)))
            one.add(request)
            while one.busy:
                found += [(token.id, token.logprob) for token in one.step()[0].tokens]
                if number == 2 and len(request.ids) == len(ids) + 4:
                    one.cancel(request)
            ids = request.ids
            found.append((request.done, [state.length for state in one.runner.prefixes.states]))
        return found

    found = turns()
    assert len(launched) > 12
    read_one_by_one(monkeypatch)
    assert turns() == found


def test_what_is_kept_is_kept_before_the_next_step(launched, monkeypatch):
    """A mark in the middle of an answer holds the state of that length."""

    def marks() -> list:
        launched.clear()
        one = engine(slots=1, snapshots=4)
        one.add(Request(text(20, 2), WARM, Limits(10), keep=(20, 25), stop_ids=()))
        while one.busy:
            one.step()
        return [(state.length, state.held.rings.parts) for state in one.runner.prefixes.states]

    found, count = marks(), len(launched)
    read_one_by_one(monkeypatch)
    expected = marks()
    assert [length for length, _ in found] == [length for length, _ in expected] == [20, 25, 29]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert all(map(same, ours, theirs))
    # all but the prompt's, the captured one, and the one behind the mark
    assert count == 10 - 3


def test_an_engine_that_forgets_has_no_step_left(launched):
    one = engine()
    one.add(asked(0))
    for _ in range(4):
        one.step()
    assert one.runner.ahead.launched
    one.forget()
    assert not one.runner.ahead.launched
    assert not one.busy
    requests = [asked(1), asked(2)]
    assert played(one, requests) == played(engine(), [asked(1), asked(2)])


def test_followers_run_ahead_too(drafting, monkeypatch):
    """Their caches are the leader's after every step, whatever a constraint takes in place of what was drawn."""
    meeting = Meeting()
    monkeypatch.setattr(World, "broadcast_from_leader", lambda world, x: meeting.broadcast(x))
    one = Engine(model_of("mtp"), Capacity(3, 300), "cpu", meeting, drafting)
    other, names = Follower(model_of("mtp"), "cpu"), []
    rules = [Script(instead={(5, token): 9 for token in range(128)}) if drafting.most == 0 else None, None, None]
    requests = [asked(number, constraint=rules[number]) for number in range(3)]

    def follow(step: int) -> None:
        if step == 7:
            one.cancel(requests[2])
        one._orders.send_orders()  # what it would tell with the next step
        names.extend(meeting.follow(other))
        assert same_ranks(one.runner, other.runner)
        assert one.runner.ahead.launched == other.runner.ahead.launched
        assert not meeting.sent

    played(one, requests, follow)
    assert ("take_back" in names) == (drafting.most == 0)


def test_a_request_that_comes_waits_for_one_step(launched):
    one, other = engine(), asked(1)
    one.add(asked(0, 30))
    for _ in range(4):
        one.step()
    one.add(other)
    assert [result.request.number for result in one.step()] == [0]
    assert other in [result.request for result in one.step()]


@pytest.mark.slow  # graphs are those of a GPU
def test_no_rank_holds_a_captured_step_when_it_has_ended(monkeypatch):
    """NCCL's process group waits for the graphs that hold its launches."""
    steps, prepared = [], GraphRunner._prepared

    def noted(graphs, *key):
        step = prepared(graphs, *key)
        steps.append(ref(step))
        return step

    monkeypatch.setattr(GraphRunner, "_prepared", noted)
    meeting = Meeting()
    monkeypatch.setattr(World, "broadcast_from_leader", lambda world, x: meeting.broadcast(x))
    with Engine(model_of("mtp"), Capacity(3, 300), "cpu", meeting, Drafting(3)) as one:
        other = Follower(model_of("mtp"), "cpu")
        one.add(asked(0))
        while one.busy:
            one.step()
            meeting.follow(other)
    other.close()
    assert len(steps) > 1
    assert [step() for step in steps] == [None] * len(steps)


def test_ranks_are_busy_once_one_is_lost():
    """However their requests end: who watches them says which one it was."""
    rests = []

    class Lost(Meeting):
        def send_orders(self, orders):
            raise RuntimeError("Connection closed by peer")

        def rest(self):
            rests.append(True)

    one = Engine(model_of("mtp"), Capacity(3, 300), "cpu", Lost(), Drafting(0))
    request = asked(0)
    one.add(request)
    with pytest.raises(RuntimeError, match="Connection"):
        one.step()
    one.cancel(request)
    assert rests == []
