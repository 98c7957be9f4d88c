"""A rank that follows verifies and takes the drafts that the leader's engine names: its cache is the leader's."""

import json

import pytest
import torch

from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import Follower
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tests.engine.runtime.test_speculation import Script, everywhere
from tests.support.speculation import always_draft, know, model_of, text

WARM = Sampling(0.8, 0.9, 11)
SLOW = pytest.mark.slow


class Meeting(Followers):
    """Ranks that are not there: the leader's orders, and what it tells within steps."""

    def __init__(self):
        super().__init__(World())
        self.orders, self.sent, self.leads = [], [], True

    def send_orders(self, orders):
        self.orders += json.loads(json.dumps(orders))

    def rest(self):
        pass

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """As `World.broadcast_from_leader`."""
        if self.leads:
            self.sent.append(x.clone())
            return x
        assert x.shape == self.sent[0].shape
        return self.sent.pop(0)

    def follow(self, other: Follower) -> list[str]:
        """Has a follower do what was ordered; the orders."""
        orders, self.orders, self.leads = self.orders, [], False
        other.carry_out(orders)
        self.leads = True
        return [name for name, _ in orders]


def state(one: runner.Runner) -> list[torch.Tensor]:
    layers = one.cache.layers
    held = [ring.data for layer in layers for ring in layer.rings()]
    return held + [pool.data for layer in layers for pool in layer.pools()]


def same(one: runner.Runner, other: runner.Runner) -> bool:
    counts = [(each.cache.free_slots, each.cache.used_blocks) for each in (one, other)]
    return counts[0] == counts[1] and all(map(torch.equal, state(one), state(other)))


@pytest.fixture
def meeting(monkeypatch):
    found = Meeting()
    monkeypatch.setattr(World, "broadcast_from_leader", lambda world, x: found.broadcast(x))
    always_draft(monkeypatch)
    return found


def asked(prompts: list[list[int]], rules=None) -> list[Request]:
    return [
        Request(ids, WARM.plus(number), Limits(12, prefill_chunk=50), rules and rules[number], stop_ids=())
        for number, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("drafter", "captures"),
    [
        ("mtp", True),
        pytest.param("mtp", False, marks=SLOW),
        *(pytest.param("dspark", way, marks=SLOW) for way in (0, 1)),
    ],
)
def test_followers_take_the_same_drafts(drafter, captures, meeting, monkeypatch):
    """Requests join, end and are cancelled; a constraint asks for other tokens, behind which is drafted anew."""
    monkeypatch.setattr(runner, "captures", lambda device: captures)
    prompts = [text(length, length) for length in (5, 126, 40)]
    alone = [Engine.of(model_of(drafter), [one], "cpu") for one in asked(prompts)]
    free = []
    for one in alone:
        [request] = one.runner.scheduler.active
        while one.busy:
            one.step()
        free.append(request.ids)
    meeting.orders.clear()
    meeting.sent.clear()
    rules = [None, Script(forced={3: 9, 7: 0}), None]
    requests = asked(prompts, rules)
    one = Engine(model_of(drafter), Capacity(3, 300), "cpu", meeting, Drafting(5))
    know(one, free, everywhere())
    other, names, steps = Follower(model_of(drafter), "cpu"), [], 0
    for request in requests[:2]:
        one.add(request)
    while one.busy:
        one.step()
        steps += 1
        if steps == 4:
            one.add(requests[2])
        if steps == 7:
            one.cancel(requests[0])
        one._orders.send_orders()  # what it would tell with the next step
        names += meeting.follow(other)
        assert same(one.runner, other.runner)
        assert not meeting.sent
    assert names.count("step") == steps
    assert "speculate" in names
    assert one.draft_report().accepted > 8
    assert requests[2].ids == free[2]
    assert requests[1].ids[len(prompts[1]) + 3] == 9


@SLOW
def test_followers_keep_the_same_prefixes(meeting):
    """A conversation with drafts, of which a turn takes some tokens back."""
    one = Engine(model_of("mtp"), Capacity(longest=300, snapshots=4), "cpu", meeting, Drafting(7))
    other, ids = Follower(model_of("mtp"), "cpu"), text(60, 1)
    for number in range(3):
        request = Request(ids, WARM.plus(number), Limits(10), stop_ids=(), keep=(len(ids) // 2, len(ids)))
        one.add(request)
        # right where it is what was said before
        know(one, [*[[]] * number, ids + text(20, 9)], everywhere())
        while one.busy:
            one.step()
        one._orders.send_orders()
        meeting.follow(other)
        assert same(one.runner, other.runner)
        ids = request.ids[: len(request.ids) - 2 * number] + text(5, number)
    assert request.done > 60
