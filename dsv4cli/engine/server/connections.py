"""Client connections: their limit, eviction of idle ones, and clients that are slow or half-closed."""

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

from dsv4cli.engine.server.front import UNIX_CLIENT

# bytes; the kernel buffers this much for a client that does not read
SEND_BUFFER = 256 << 10
# a connection that has been idle for less is not evicted: its request may be in transit
FRESH_SECONDS = 1.0
# how often a half-closed connection is checked for a reset
PROBE_SECONDS = 0.25
# a client that vanishes without closing its connection, such as a laptop that sleeps, is noticed after
# ALONE_SECONDS + PROBES * BETWEEN_PROBES seconds. The system's usual time is two hours
ALONE_SECONDS, BETWEEN_PROBES, PROBES = 30, 10, 3
# key of the connection in a request's scope
CONNECTION = "connection"


@dataclass(frozen=True)
class HttpLimits:
    """Limits of connections.

    Attributes:
        connections: clients at once. Up to as many more can connect and are refused with 503. Beyond that, idle
            connections are closed to accept new ones.
        header_seconds: time for a request's line and headers to arrive.
        write_seconds: a client that reads nothing for this long is disconnected.
        idle_seconds: time that a connection without a request is kept open.
    """

    connections: int = 256
    header_seconds: float = 20
    write_seconds: float = 60
    idle_seconds: float = 30


class BoundedProtocol(H11Protocol):
    """A connection that is closed if its client is too slow, or if it is idle and another client needs its slot.

    Attributes:
        admitted: whether a request on it passed the access checks, which includes the API key if the server has keys.
        late: whether the server already had the maximum number of clients when this one connected.
        on_half_close: called when the client has closed its sending side, but may still wait for the answer.
    """

    limits = HttpLimits()
    admitted = late = False
    on_half_close: Callable[[], None] | None = None
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _probing: asyncio.TimerHandle | None = None
    _half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Accept a new connection, or abort it if the server has no free slot."""
        super().connection_made(transport)
        self.client = self.client or (UNIX_CLIENT, 0)
        self.idle_since = self.loop.time()
        if not self._find_place():
            transport.abort()
            return
        self.late = len(self._open()) > self.limits.connections
        self.app_state = {CONNECTION: self}
        transport.set_write_buffer_limits(high=0)  # any byte that is not sent at once pauses writing
        own = transport.get_extra_info("socket")
        with suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        _notice_end(own)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Process received bytes, and start or stop the timeout for the headers."""
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._forget_headers()
        elif self._header_timer is None and not self.transport.is_closing():
            self._expect_headers()

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio expects a result
        """Handle a client that has closed its sending side: it is gone, or waits for the answer to its request.

        Returns:
            True to keep the connection open for the answer.
        """
        if self.idle or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        self._half_closed = True
        if self.cycle.response_started:
            if self.on_half_close is not None:
                self.on_half_close()
        elif self.conn.their_http_version == b"1.1":
            # a client that is gone resets the connection; one that waits ignores this response
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event))
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the timers of a connection that has closed."""
        self._forget_headers()
        for timer in (self._write_timer, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Mark the connection as idle, and close it if the client will send no further requests."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if self._half_closed:
            self.transport.close()

    def pause_writing(self) -> None:
        """Start the write timeout: the client is not reading."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Stop the write timeout: the client has read what was sent."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    @property
    def idle(self) -> bool:
        """Whether no request is in progress, and the client has been sent all of the last response."""
        return self.cycle is None or (self.cycle.response_complete and not self.flow.write_paused)

    @property
    def crowded(self) -> bool:
        """Whether more clients are admitted than the limit allows."""
        return sum(one.admitted for one in self._open()) > self.limits.connections

    def _open(self) -> "list[BoundedProtocol]":
        return [one for one in cast("set[BoundedProtocol]", self.connections) if not one.transport.is_closing()]

    def _find_place(self) -> bool:
        """Return True if this connection may stay. If the server is full, close an idle connection for it.

        The victim is the connection that has been idle longest, from the address with the most idle connections.
        Connections that were never admitted are closed first. Connections idle for less than `FRESH_SECONDS` are closed
        only if no slot is left at all, and only for a client from another address.
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
        """Abort the connection if its client has reset it.

        Reading has stopped, so asyncio would not notice the reset.
        """
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)  # poll reports errors without a mask
        if poll.poll(0):
            self.transport.abort()
        else:
            self._probing = self.loop.call_later(PROBE_SECONDS, self._probe)

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

    def _forget_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _expect_reading(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self._check_reading, left)

    def _check_reading(self, before: int) -> None:
        """Abort the connection if as many bytes are left to send as `before`; otherwise check again later."""
        if self.transport.get_write_buffer_size() < before:
            self._expect_reading()
        else:
            self.transport.abort()


def _notice_end(own: socket.socket) -> None:
    """Let the system probe a connection that is silent, and end it if the client has vanished."""
    with suppress(OSError, AttributeError):  # a socket without TCP options, or a system with others
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALONE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN_PROBES)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def connection_of(scope: Scope) -> BoundedProtocol | None:
    """Return the connection of a request, None if another server runs the app."""
    connection: BoundedProtocol | None = scope.get("state", {}).get(CONNECTION)
    return connection
