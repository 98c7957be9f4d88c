"""Which requests begin together."""

import asyncio
import json
import selectors
from contextlib import ExitStack

import pytest

from dsv4cli.engine.server import gathering
from dsv4cli.engine.server.gathering import ROUNDS, Gathering
from tests.engine.server.test_http import REQUEST, SMALL, connected, ends
from tests.support.serving import asking, comes, served
from tests.support.slow import slow


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop whose clock advances only while nothing is ready to run, and then to the next timer."""

    def __init__(self):
        super().__init__(_NoWait(self))
        self.now = 0.0

    def time(self):
        return self.now


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._of = loop

    def select(self, timeout=None):
        found = super().select(0)
        self._of.now += timeout or 0.0
        return found


def gathered(monkeypatch, work, quiet=0.05, longest=10.0):
    """What was released, in which groups, while `work` adds requests in simulated time; silent is what it says."""
    monkeypatch.setattr(gathering, "QUIET", quiet)
    monkeypatch.setattr(gathering, "LONGEST", longest)
    silent, released = [0], []

    async def run():
        one = Gathering(lambda: silent[0], released.append)
        await work(one, silent, released)

    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        runner.run(run())
    return released


async def rounds(count=ROUNDS + 2):
    for _ in range(count):
        await asyncio.sleep(0)


def test_alone_a_request_is_held_for_some_rounds_of_the_loop(monkeypatch):
    async def work(one, silent, released):
        one.add(["a"])
        await rounds(ROUNDS - 1)
        assert released == []
        await rounds(3)
        assert released == [["a"]]
        assert not one.holds

    gathered(monkeypatch, work, quiet=60)


def test_those_who_have_connected_are_waited_for(monkeypatch):
    async def work(one, silent, released):
        silent[0] = 2
        for name in "abc":
            one.add([name])
            await rounds()
            assert released == []
            silent[0] -= 1
        await asyncio.sleep(0.1)
        assert released == [["a", "b", "c"]]

    gathered(monkeypatch, work)


def test_those_who_ask_nothing_are_not_waited_for_long(monkeypatch):
    async def work(one, silent, released):
        silent[0] = 1
        one.add(["a"])
        await rounds()
        assert released == []
        await asyncio.sleep(0.1)
        assert released == [["a"]]

    gathered(monkeypatch, work, quiet=0.01)


def test_however_many_come_the_first_does_not_wait_for_ever(monkeypatch):
    async def work(one, silent, released):
        silent[0], number = 1, 0
        while not released and number < 200:
            one.add([number])
            number += 1
            await asyncio.sleep(0.005)

    assert gathered(monkeypatch, work, quiet=0.2, longest=0.3)[0][:3] == [0, 1, 2]


def test_who_goes_is_not_held(monkeypatch):
    async def work(one, silent, released):
        one.add(["a"])
        one.add(["b"])
        assert one.drop("a")
        assert not one.drop("c")
        await rounds()

    assert gathered(monkeypatch, work) == [["b"]]


@pytest.mark.parametrize("others", [*slow(0), 2])
def test_clients_that_come_together_are_read_in_one_step(monkeypatch, others):
    # another connection asks nothing: it is waited for, here until the test says that QUIET seconds have passed
    monkeypatch.setattr(gathering, "QUIET", 3600.0)
    monkeypatch.setattr(gathering, "LONGEST", 3600.0)
    head = REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with served(SMALL) as server, ExitStack() as stack:
        step, read, gathers = server.engine.step, [], server.asked._gathering
        monkeypatch.setattr(server.engine, "step", lambda: read.append(len(done := step())) or done)
        clients = [stack.enter_context(connected(server)) for _ in range(2 + others)]
        assert comes(lambda: len(server.server.server_state.connections) == len(clients))
        for number, client in enumerate(clients[1:]):
            body = json.dumps(asking(f"{number} and on", max_tokens=1)).encode()
            client.sendall(head % len(body) + body)
            assert comes(lambda held=number + 1: len(gathers._held) == held)
        assert read == []
        monkeypatch.setattr(gathering, "QUIET", 0.0)
        server.loop.call_soon_threadsafe(gathers._settle, ())
        assert all(map(ends, clients[1:]))
        assert read == [1 + others]
