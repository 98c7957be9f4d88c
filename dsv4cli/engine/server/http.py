"""An HTTP server around an ASGI app, with limited connections and a graceful shutdown. Does not import torch."""

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
from dsv4cli.engine.server.front import PROXIES
from dsv4cli.errors import UsageError

# the most bytes of a request's line and headers
MOST_HEADER = 64 << 10
# how long to wait at shutdown for the errors of cut-off answers to be sent
LAST_WORDS_SECONDS = 1
LISTEN = "use --host 127.0.0.1 or --host 0.0.0.0"


class HttpServer(uvicorn.Server):
    """Serves an app until `stop` is called. The event loop sleeps while no requests arrive."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, grace: float, ready: Callable[[], None]) -> None:
        """Configure uvicorn.

        Args:
            limits: limits of connections.
            grace: seconds that answers have to finish after `stop`.
            ready: called once clients can connect.
        """
        bounded = type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
        super().__init__(
            uvicorn.Config(
                app, http=bounded, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=True,
                forwarded_allow_ips=[*PROXIES],
                server_header=False, date_header=False, h11_max_incomplete_event_size=MOST_HEADER,
                timeout_keep_alive=int(limits.idle_seconds), timeout_graceful_shutdown=ceil(grace),
            )
        )  # fmt: skip
        self.limits, self._ready = limits, ready
        self._stopped = asyncio.Event()
        logger = logging.getLogger("uvicorn.error")
        logger.addHandler(logging.NullHandler())  # malformed requests are not logged
        logger.propagate = False

    def stop(self) -> None:
        """Stop accepting connections. `serve` returns when the answers have finished or their grace period is over.

        A second call aborts all connections, so that `serve` returns soon.
        """
        if self._stopped.is_set():
            self.force_exit = True
            for connection in [*self.server_state.connections]:  # Python 3.12 and later wait for them too
                connection.transport.abort()
        self._stopped.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening.

        Raises:
            UsageError: another program has started to listen at the address since it was bound.
        """
        [bound] = sockets or []
        # applies to its connections too: the next server need not wait for TIME_WAIT to end
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            await super().startup(sockets)
        except OSError as error:
            if bound.family == socket.AF_UNIX:
                raise
            host, port = bound.getsockname()[:2]
            raise _taken(host, port, error) from None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop what is still running, and notify clients whose answers are cut off."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_SECONDS)

    async def main_loop(self) -> None:
        """Wait for `stop`. uvicorn's own loop would poll ten times a second."""
        self._ready()
        await self._stopped.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, which no client can connect to yet and no other program can bind.

    Raises:
        UsageError: the address does not exist, or is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio sets TCP_NODELAY only if the protocol is given; without it an answer waits 40 ms for an ACK
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise UsageError(f"cannot resolve the address {host}: {error.strerror}", LISTEN) from None
    except UnicodeError:
        raise UsageError(f"cannot resolve the address {host}", LISTEN) from None
    try:
        # ignore connections of a server that has ended, but not another socket that is bound
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{host} is not an address of this machine", LISTEN) from None
        raise _taken(host, port, error) from None
    return made


def _taken(host: str, port: int, error: OSError) -> UsageError:
    what = f"cannot listen on {host}, port {port}: {error.strerror}"
    return UsageError(what, "use another --port, or 0 for any free one")


def url_of(bound: socket.socket) -> str:
    """Return the URL of a socket for a browser on this machine, or `unix:PATH`."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
