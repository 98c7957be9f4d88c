"""Answers that take long, whole or as server-sent events: they end when their client goes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dsv4cli.engine.server.async_engine import EngineCall
from dsv4cli.engine.server.refusals import Refusal

T = TypeVar("T")


class ClientGone(Exception):
    """Whoever has asked has closed the connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; where the client goes before that, it is cancelled. Raises ClientGone then."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        gone.cancel()
        if working.cancel():
            with suppress(asyncio.CancelledError):
                await working


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """The events of a call, which ends with them. failed: what is sent of an error in the middle."""

    def __init__(
        self, call: EngineCall, events: AsyncGenerator[bytes, None], failed: Callable[[Refusal], bytes]
    ) -> None:
        # proxies are asked not to collect them
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._call, self._events, self._failed = call, events, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them, as ASGI has it."""
        with self._call, suppress(ClientGone):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Refusal as refusal:
            await send({"type": "http.response.body", "body": self._failed(refusal), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
