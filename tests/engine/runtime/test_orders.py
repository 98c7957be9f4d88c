"""What the other ranks are told, and when."""

import json

import pytest

from dsv4cli.engine.parallel.followers import Followers
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.follower import Follower
from dsv4cli.engine.runtime.orders import Orders, described
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.errors import UnsoundResult
from tests.support.speculation import model_of


class Heard(Followers):
    """What ranks that are not there hear."""

    def __init__(self):
        super().__init__(World())
        self.heard = []

    def send_orders(self, orders):
        self.heard.append(orders)

    def rest(self):
        self.heard.append("rest")


def test_orders_are_told_once_in_their_order():
    followers = Heard()
    orders = Orders(followers)
    orders.add("end", number=3)
    orders.add("prepare")
    orders.send_orders()
    orders.send_orders()
    orders.rest()
    assert followers.heard == [[("end", {"number": 3}), ("prepare", {})], [], "rest"]


def test_where_nobody_follows_nothing_is_kept():
    orders = Orders(None)
    orders.add("prepare")
    assert orders.waiting == []
    orders.send_orders()
    orders.rest()


def test_followers_rest_when_the_last_request_has_ended():
    followers = Heard()
    with Engine(model_of("mtp"), Capacity(2), "cpu", followers) as engine:
        requests = [Request([1, 2, 3], Sampling(0.0), Limits(2), stop_ids=()) for _ in range(2)]
        for request in requests:
            engine.add(request)
        engine.step()
        engine.cancel(requests[0])
        assert "rest" not in followers.heard
        engine.cancel(requests[1])
        assert followers.heard[-1] == "rest"


@pytest.mark.parametrize("part", ["take", "time", "prepare", "keep"])
def test_followers_rest_where_a_step_fails_after_it_was_computed(monkeypatch, part):
    """One of them that ends later must not end the process."""
    followers = Heard()

    def fail(*arguments):
        raise UnsoundResult("not finite", "")

    with Engine(model_of("mtp"), Capacity(2), "cpu", followers, Drafting(1)) as engine:
        request = Request([1, 2, 3], Sampling(0.0), Limits(1), stop_ids=())
        engine.add(request)
        target = {"take": engine._plan, "time": engine._plan, "prepare": engine.runner, "keep": engine.runner}[part]
        monkeypatch.setattr(target, "end" if part == "keep" else part, fail)
        with pytest.raises(UnsoundResult):
            engine.prepare() if part == "prepare" else engine.step()
        assert followers.heard[-1] == "rest"
        monkeypatch.undo()


def test_a_follower_has_the_request_that_was_described():
    limits = Limits(max_tokens=9, max_context=90, prefill_chunk=7)
    sampling = Sampling(0.7, 0.9, 5, logit_bias=((3, 1.5),))
    own = {"keep": (2,), "scored": True, "cache_scope": "alice"}
    request = Request([1, 2, 3], sampling, limits, number=4, end=12, **own)
    follower = Follower(model_of("mtp"), "cpu")
    follower.carry_out([("begin", {}), ("add", json.loads(json.dumps(described(request))))])
    [own] = follower.runner.scheduler.active
    assert (own.number, own.prompt, own.end, [*own.keep], own.scored) == (4, [1, 2, 3], 12, [2], True)
    assert own.cache_scope == "alice"
    assert (own.limits.prefill_chunk, own.limits.max_context) == (7, 90)
    assert (own.sampling.temperature, own.sampling.top_p, own.sampling.seed) == (0.7, 0.9, 5)
    assert [(token, bias) for token, bias in own.sampling.logit_bias] == [(3, 1.5)]
