"""Connections: how many there may be, which are closed for others, and clients that are slow or send no more."""

import asyncio
import select
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

# bytes that the system keeps for a client that does not read
SEND_BUFFER = 256 << 10
# a connection that has been idle for less is not closed for another one: its request may be on the way
FRESH_SECONDS = 1.0
# how often a connection whose client sends no more is asked whether the client is there
PROBE_SECONDS = 0.25
# of a request's scope: its connection
CONNECTION = "connection"


@dataclass(frozen=True)
class HttpLimits:
    """Limits of connections.

    Attributes:
        connections: Clients at once; as many more are told so. Beyond, idle connections are closed for new ones.
        header_seconds: For a request's line and headers to arrive.
        write_seconds: A client that reads nothing for this long has gone.
        idle_seconds: A connection without a request is kept.
    """

    connections: int = 256
    header_seconds: float = 20
    write_seconds: float = 60
    idle_seconds: float = 30


class BoundedProtocol(H11Protocol):
    """A connection that ends where its client is too slow, or where others need its place.

    Attributes:
        admitted: Whether a request on it was let in: with API keys, whether it had one.
        late: Whether there were as many clients as may be when it connected.
        on_half_close: Called when its client sends no more, but may wait for its answer.
    """

    limits = HttpLimits()
    admitted = late = False
    on_half_close: Callable[[], None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _probing: asyncio.TimerHandle | None = None
    _half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """A client has connected."""
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        if not self._find_place():
            transport.abort()
            return
        self.late = len(self._open()) > self.limits.connections
        self.app_state = {CONNECTION: self}
        transport.set_write_buffer_limits(high=0)  # what is not taken at once counts as waiting
        with suppress(OSError):  # a connection over a socket of another family
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._end_after(self.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        """A client has sent something."""
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._forget_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._end_after(self.limits.header_seconds)

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio has a result here
        """The client sends no more: it has gone, or it waits for the answer to what it has sent."""
        if self.idle or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        self._half_closed = True
        if self.cycle.response_started:
            if self.on_half_close is not None:
                self.on_half_close()
        elif self.conn.their_http_version == b"1.1":
            # a client that has gone resets the connection; one that waits ignores it
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event))
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._forget_timer()
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The answer is written."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if self._half_closed:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        super().pause_writing()
        self._end_after(self.limits.write_seconds)

    def resume_writing(self) -> None:
        """It has taken it."""
        self._forget_timer()
        super().resume_writing()

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def crowded(self) -> bool:
        """Whether more clients have been let in than may be."""
        return sum(one.admitted for one in self._open()) > self.limits.connections

    def _open(self) -> "list[BoundedProtocol]":
        return [one for one in cast("set[BoundedProtocol]", self.connections) if not one.transport.is_closing()]

    def _find_place(self) -> bool:
        """Return whether this connection has a place, for which another one may be closed.

        It is the one that has been idle longest, of the address that has most idle connections; those that were
        admitted go last. Fresh ones go only where no place is left, and for clients of other addresses.
        """
        there = self._open()
        if len(there) <= self.limits.connections:
            return True
        idle = [one for one in there if one.idle and one is not self]
        idle = [one for one in idle if not one.admitted] or idle
        held = Counter(one._address for one in idle)
        fresh = self.loop.time() - FRESH_SECONDS
        stale = [one for one in idle if one.idle_since <= fresh]
        full = len(there) > 2 * self.limits.connections
        others = [one for one in idle if held[one._address] > held[self._address]] if full else []
        victims = stale or others
        if victims:
            min(victims, key=lambda one: (-held[one._address], one.idle_since)).transport.abort()
        return bool(victims) or not full

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _probe(self) -> None:
        """End the connection where its client has reset it: nobody reads from it, and so nobody else would see that."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # errors come without being asked for
        if poll.poll(0):
            self.transport.abort()
        else:
            self._probing = self.loop.call_later(PROBE_SECONDS, self._probe)

    def _end_after(self, seconds: float) -> None:
        self._forget_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_of(scope: Scope) -> BoundedProtocol | None:
    """Return the connection of a request, None where the server is not ours."""
    connection: BoundedProtocol | None = scope.get("state", {}).get(CONNECTION)
    return connection
