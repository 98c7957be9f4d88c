"""The HTTP server around an ASGI app: connections within bounds, and an end that lets answers finish; no torch."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

import uvicorn
from starlette.types import ASGIApp

from dsv4cli.engine.server.connections import BoundedProtocol, HttpLimits
from dsv4cli.errors import UsageError

# bytes of a request's line and headers
MOST_HEADER = 64 << 10
# how long it may take to tell clients that their answers are broken off
LAST_WORDS_SECONDS = 1
LISTEN = "use --host 127.0.0.1 or --host 0.0.0.0"


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
