"""Answers that take long, whole or as server-sent events: they end when their client goes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dsv4cli.engine.server import async_engine
from dsv4cli.engine.server.async_engine import EngineCall
from dsv4cli.engine.server.connections import connection_of
from dsv4cli.engine.server.refusals import Refusal, broken_off, json_response

T = TypeVar("T")


class ClientGone(Exception):
    """Whoever has asked has closed the connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; where the client goes before that, it is cancelled. Raises ClientGone then, and `Refusal`
    where the server does not wait for it at its end."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    except asyncio.CancelledError:
        raise broken_off() from None
    finally:
        gone.cancel()
        if working.cancel():
            with suppress(asyncio.CancelledError):
                await working


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class CallReply(Protocol):
    """What a call's answers become."""

    def usage(self) -> dict[str, Any]:
        """How many tokens went in and came out, in OpenAI's shape."""

    async def document(self) -> dict[str, Any]:
        """All of it, once it has ended."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Its pieces as they come."""


async def answered(
    http: HttpRequest, call: EngineCall, reply: CallReply, failed: Callable[[Refusal], bytes], *, stream: bool
) -> Response:
    """The response to a request: the document of a call, or its events, with `failed` as `EventStream` has it."""
    http.state.call, http.state.usage = call, reply.usage
    connection = connection_of(http.scope)
    if connection is not None:
        connection.on_half_close = call.nudge
    if stream:
        return EventStream(call, reply.events(), failed)
    with call:
        return json_response(await while_connected(http.receive, reply.document()))


class Silence:
    """Since when a client has been sent nothing."""

    def __init__(self) -> None:
        self._since = monotonic()

    @property
    def long(self) -> bool:
        """Whether a client is to be told that it waits."""
        return monotonic() - self._since >= async_engine.IDLE_SECONDS

    def ended_by(self, event: bytes) -> bytes:
        """An event, which is sent now."""
        self._since = monotonic()
        return event


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
            try:
                await while_connected(receive, self._send_all(send))
            except Refusal as refusal:
                scope["state"]["refusal"] = refusal
                await send({"type": "http.response.body", "body": self._failed(refusal), "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
