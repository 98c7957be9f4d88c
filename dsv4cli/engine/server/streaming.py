"""Long-running responses, whole or as server-sent events. They are cancelled if their client disconnects."""

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
    """The client has closed the connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, and cancel it if the client disconnects first.

    Raises:
        ClientGone: the client has disconnected.
        Refusal: the server is shutting down and does not wait for the result.
    """
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
    """The response of a call."""

    def usage(self) -> dict[str, Any]:
        """Return the token counts of prompt and answers, in OpenAI's shape."""

    async def document(self) -> dict[str, Any]:
        """Wait for the end, and return the whole response."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events."""


async def answered(
    http: HttpRequest, call: EngineCall, reply: CallReply, failed: Callable[[Refusal], bytes], *, stream: bool
) -> Response:
    """Return the response to a request: the document of a call, or a stream of its events.

    Args:
        failed: returns the event that reports an error during the stream.
    """
    http.state.call, http.state.usage = call, reply.usage
    connection = connection_of(http.scope)
    if connection is not None:
        connection.on_half_close = call.nudge
    if stream:
        return EventStream(call, reply.events(), failed)
    with call:
        return json_response(await while_connected(http.receive, reply.document()))


class Silence:
    """The time since the client was last sent an event."""

    def __init__(self) -> None:
        self._since = monotonic()

    @property
    def long(self) -> bool:
        """Whether it is time for a keep-alive."""
        return monotonic() - self._since >= async_engine.IDLE_SECONDS

    def ended_by(self, event: bytes) -> bytes:
        """Return an event that is sent now, and restart the timer."""
        self._since = monotonic()
        return event


class EventStream(StreamingResponse):
    """A streaming response with the events of a call. The call ends when the stream does.

    Args:
        failed: returns the event that reports an error during the stream.
    """

    def __init__(
        self, call: EngineCall, events: AsyncGenerator[bytes, None], failed: Callable[[Refusal], bytes]
    ) -> None:
        # ask proxies not to buffer the events
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._call, self._events, self._failed = call, events, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, as ASGI requires."""
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
