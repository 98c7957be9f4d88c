"""What waits for a client that does not read, an engine that lacks memory for what is optional, and one that hangs."""

import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.server.accounts import ANYONE
from dsv4cli.engine.server.async_engine import MOST_UNREAD, AsyncEngine, EngineCall
from dsv4cli.engine.server.engine_thread import EngineThread, Update
from dsv4cli.engine.server.metrics import Metrics
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import NotEnoughMemory
from tests.support.serving import comes

TOP = [(7, -1.0)] * 20


class Ended(list):
    """Stands for the engine: takes the requests that are ended, and how."""

    def cancel(self, request, outcome):
        self.append((request, outcome))


def took(call, request, tokens):
    call.take(Update(request, 0.0, [Token(7, -1.0, TOP, None)] * tokens))


def test_a_client_that_does_not_read_ends_its_requests():
    async def run():
        ended, requests = Ended(), [Request([1], Sampling(), Limits()) for _ in range(2)]
        with EngineCall(ended, requests) as call:
            for _ in range(3):  # one that reads may have as much as it likes
                took(call, requests[0], MOST_UNREAD // 21)
                assert len(await call.updates()) == 1
            took(call, requests[1], MOST_UNREAD // 21)
            assert ended == []
            took(call, requests[0], 1)
            assert {request for request, _ in ended} == {*requests}
            assert {outcome for _, outcome in ended} == {"cancelled"}
            with pytest.raises(Refusal, match="did not read the answer in time") as error:
                await call.updates()
            assert error.value.status == 408
        assert call.broken_off
        assert len(ended) == 2

    asyncio.run(run())


@contextmanager
def engine_of(lines, **own):
    """An engine that computes nothing, as the event loop sees it."""
    runner = SimpleNamespace(cache=SimpleNamespace(device=torch.device("cpu")))
    nothing = {"busy": False, "prepare": lambda: False, "preparing": False, "unpinned": None, "add": lambda _: None}
    nothing |= {"cancel": lambda _: None, "followers": None, "max_request_tokens": None, "runner": runner}
    engine = SimpleNamespace(**nothing | own)
    one = AsyncEngine(engine, 9, Metrics(), lambda: 0, lines.append)
    try:
        yield one
    finally:
        assert one.close(60)


def test_a_client_that_does_not_read_strands_nobody():
    """Its last token is the one that breaks it off, and another client's last is in the same step."""

    async def run():
        with engine_of([]) as engine:
            slow, other = (Request([1], Sampling(), Limits()) for _ in range(2))
            with engine.call([slow], ANYONE) as slow_call, engine.call([other], ANYONE) as other_call:
                tokens = [Token(7, -1.0, [], None)] * MOST_UNREAD
                engine._hand_out([Update(slow, 1.0, tokens), Update(other, 1.0, tokens[:1])])
                assert len(await other_call.updates()) == 1
                last = [Update(one, 2.0, tokens[:1], ended=True) for one in (slow, other)]
                engine._hand_out(last)
                assert await other_call.updates() == last[1:]
                with pytest.raises(Refusal, match="did not read the answer in time"):
                    await slow_call.updates()
            assert not engine._calls

    asyncio.run(run())


def test_a_server_goes_on_where_steps_cannot_be_prepared_in_advance():
    lines, tries = [], []

    def prepare():
        tries.append(1)
        raise NotEnoughMemory("the GPU ran out of memory", "lower --cache-memory")

    async def run():
        with engine_of(lines, prepare=prepare) as engine:
            async with asyncio.timeout(60):
                while not lines:
                    await asyncio.sleep(0)
            for _ in range(3):
                engine._thread._order(list)
            assert not engine.failure.done()
        assert len(tries) == 1

    asyncio.run(run())
    assert lines == ["steps are prepared on demand from now on: the GPU ran out of memory; lower --cache-memory"]


def test_several_ranks_end_where_one_cannot_prepare_a_step():
    """The others may have prepared it."""

    def prepare():
        raise NotEnoughMemory("the GPU ran out of memory", "lower --cache-memory")

    async def run():
        with engine_of([], prepare=prepare, followers=object()) as engine:
            assert isinstance(await engine.failure, NotEnoughMemory)

    asyncio.run(run())


def test_that_memory_is_not_pinned_is_said_once():
    lines = []

    async def run():
        with engine_of(lines, unpinned=NotEnoughMemory("not pinned", "lower --cache-memory")) as engine:
            for _ in range(3):
                engine._thread._order(list)
            async with asyncio.timeout(60):
                while not lines:
                    await asyncio.sleep(0)

    asyncio.run(run())
    assert lines == ["the prefix cache in host memory is slower: not pinned; lower --cache-memory"]


def test_an_engine_hangs_where_no_step_ends_though_requests_run(monkeypatch):
    """Whatever its thread does in the meantime; not while it has nothing to do, or compiles."""

    async def run():
        with engine_of([]) as engine:
            engine.hung_seconds = 0.0
            monkeypatch.setattr(EngineThread, "seconds", 0.0)
            assert engine.hangs is None
            request = Request([1], Sampling(), Limits())
            with engine.call([request], ANYONE):
                assert engine.hangs == "no step has ended for 0 s, though requests are running"
                engine._thread._engine.preparing = True
                assert engine.hangs is None
                engine._thread._engine.preparing = False
                engine.hung_seconds = 600.0
                engine._last_step -= 601
                assert engine.hangs == "no step has ended for 601 s, though requests are running"
                engine._hand_out([Update(request, 1.0, [])])
                assert engine.hangs is None
            engine._last_step -= 601
            with engine.call([request], ANYONE):  # an engine that had nothing to do has not hung
                assert engine.hangs is None

    asyncio.run(run())


def test_health_says_that_a_step_hangs_and_not_that_it_compiles(nano, monkeypatch):
    step, runs, may_end = nano.engine.step, threading.Event(), threading.Event()

    def slowly():
        runs.set()
        may_end.wait(60)
        return step()

    monkeypatch.setattr(nano.engine, "step", slowly)
    asked = threading.Thread(target=nano.chat, args=["What is 2 + 3?"])
    asked.start()
    assert runs.wait(60)
    assert nano.get("/health")[0] == 200
    monkeypatch.setattr(nano.asked, "hung_seconds", 0.0)
    status, document = nano.get("/health")
    assert (status, document["error"]["message"]) == (503, "the engine hangs: its current step has run for 0 s")
    preparing = nano.engine.runner.preparing
    monkeypatch.setattr(preparing, "_reported", True)
    assert nano.get("/health")[0] == 200
    monkeypatch.setattr(preparing, "_reported", False)
    may_end.set()
    asked.join(60)
    assert comes(nano.at_rest)
    assert comes(lambda: nano.get("/health")[0] == 200)  # it waits
