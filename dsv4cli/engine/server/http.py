"""The HTTP server around an ASGI app: connections within bounds, and an end that lets answers finish; no torch."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv4cli.errors import UsageError

# bytes of a request's line and headers
MOST_HEADER = 64 << 10
# bytes that the system keeps for a client that does not read
SEND_BUFFER = 256 << 10
# how long it may take to tell clients that their answers are broken off
LAST_WORDS_SECONDS = 1
LATE = "late"
LISTEN = "use --host 127.0.0.1 or --host 0.0.0.0"


@dataclass(frozen=True)
class HttpLimits:
    """connections: of clients at once; as many more are told so, and the rest is not accepted. header_seconds: for a
    request's line and headers to come. write_seconds: a client that takes nothing for so long has gone.
    idle_seconds: a connection without a request is kept."""

    connections: int = 256
    header_seconds: float = 20
    write_seconds: float = 60
    idle_seconds: float = 30


class BoundedProtocol(H11Protocol):
    """A connection that ends where its client is too slow."""

    limits = HttpLimits()
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self.limits.connections:
            transport.abort()
            return
        # of a request's scope: whether its client is one of those beyond the limit
        self.app_state = {LATE: len(self.connections) > self.limits.connections}
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

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._forget_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        super().pause_writing()
        self._end_after(self.limits.write_seconds)

    def resume_writing(self) -> None:
        """It has taken it."""
        self._forget_timer()
        super().resume_writing()

    def _end_after(self, seconds: float) -> None:
        self._forget_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpServer(uvicorn.Server):
    """Serves an app until `stop`; the event loop sleeps while nothing is asked."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, grace: float, ready: Callable[[], None]) -> None:
        """grace: seconds that answers have to finish after `stop`. ready: called once clients can connect."""
        bounded = type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
        super().__init__(
            uvicorn.Config(
                app, http=bounded, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
                server_header=False, date_header=False, h11_max_incomplete_event_size=MOST_HEADER,
                timeout_keep_alive=int(limits.idle_seconds), timeout_graceful_shutdown=ceil(grace),
            )
        )  # fmt: skip
        self.limits, self._ready = limits, ready
        self._stopped = asyncio.Event()
        logger = logging.getLogger("uvicorn.error")
        logger.addHandler(logging.NullHandler())  # damaged requests are not worth a word
        logger.propagate = False

    @property
    def crowded(self) -> bool:
        """Whether more clients are connected than may be."""
        return len(self.server_state.connections) > self.limits.connections

    def stop(self) -> None:
        """Takes no more connections; answers have their grace, then `serve` ends. A second time: it ends soon."""
        if self._stopped.is_set():
            self.force_exit = True
            for connection in [*self.server_state.connections]:  # from 3.12 on asyncio waits for them too
                connection.transport.abort()
        self._stopped.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen. Raises UsageError where another program listens there meanwhile."""
        [bound] = sockets or []
        # of its connections too: the next server need not wait until the system has forgotten them
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            await super().startup(sockets)
        except OSError as error:
            host, port = bound.getsockname()[:2]
            raise _taken(host, port, error) from None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends what runs; clients whose answers are broken off are told so."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_SECONDS)

    async def main_loop(self) -> None:
        """Waits for the end, where uvicorn would look ten times a second."""
        self._ready()
        await self._stopped.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's."""
        yield


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address, which is nobody else's and which nobody can connect to yet. Raises UsageError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio sends at once (TCP_NODELAY) only where the protocol is named: else an answer waits 40 ms for an ACK
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise UsageError(f"there is no address {host}: {error.strerror}", LISTEN) from None
    except UnicodeError:
        raise UsageError(f"there is no address {host}", LISTEN) from None
    try:
        # connections of a server that has ended do not matter, a server that is about to listen does
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{host} is no address of this machine", LISTEN) from None
        raise _taken(host, port, error) from None
    return made


def _taken(host: str, port: int, error: OSError) -> UsageError:
    what = f"port {port} of {host} cannot be taken: {error.strerror}"
    return UsageError(what, "give another --port, or 0 for any that is free")


def url_of(bound: socket.socket) -> str:
    """Where a browser of this machine finds a socket."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
