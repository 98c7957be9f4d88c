"""What waits for a client that does not read."""

import asyncio

import pytest

from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.server.async_engine import MOST_UNREAD, EngineCall
from dsv4cli.engine.server.engine_thread import Update
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.settings import Limits, Sampling

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
            with pytest.raises(Refusal, match="not read in time") as error:
                await call.updates()
            assert error.value.status == 408
        assert call.broken_off
        assert len(ended) == 2

    asyncio.run(run())
