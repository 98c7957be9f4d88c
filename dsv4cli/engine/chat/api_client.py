"""Requests to a server that speaks OpenAI's API, and what it refuses in words; no torch."""

import json
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from dsv4cli.errors import ServerError, UsageError

LONGEST_WAIT = 10  # seconds to connect, and between two parts of a document; a stream may take any time
# bytes of a document, or of a line of a stream
LONGEST = 1 << 24
DATA, DONE = b"data:", b"[DONE]"


class NoAnswer(ServerError):
    """A server does not answer in time."""


class StreamEnded(Exception):
    """A stream whose connection has ended before its last event."""


class ApiClient:
    """A server by its address, as in `http://localhost:8000`, with or without `/v1` behind it. One request at a time.

    Redirections are not followed, so that a key goes to no other host.
    """

    def __init__(self, url: str, key: str = "") -> None:
        """Raises UsageError for what is no address."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._parts = _parts(self.url)
        self._socket: socket.socket | None = None  # of the last request

    def get(self, path: str) -> dict[str, Any]:
        """Return a document. Raises ServerError."""
        with self._response("GET", path, wait=LONGEST_WAIT) as response:
            return self._document(response)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a document and return the one that answers it. Raises ServerError."""
        with self._response("POST", path, body, wait=LONGEST_WAIT) as response:
            return self._document(response)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of an answer as they come. Raises ServerError, and StreamEnded where there is no last one."""
        with self._response("POST", path, body) as response:
            while line := self._line(response):
                if not line.startswith(DATA):
                    continue
                data = line.removeprefix(DATA).strip()
                if data == DONE:
                    return
                yield self._object(data)
        raise StreamEnded

    def close(self) -> None:
        """Ends the running request, from any thread or signal handler: whoever waits for it gets its end."""
        if self._socket is not None:
            with suppress(OSError):  # it has ended
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, wait: float | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request. wait: the most seconds without a part of the answer, None for any time."""
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=LONGEST_WAIT)
        with closing(connection), closing(self._answered(connection, method, path, body, wait)) as response:
            if response.status != 200:
                raise self._refusal(response, path)
            yield response

    def _answered(
        self, connection: HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None, wait: float | None
    ) -> HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(wait)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that has gone is noticed
            self._socket = connection.sock
            connection.request(method, f"{self._parts.path}{path}", content, headers)
            return connection.getresponse()
        except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: no host can have this name
            raise self._unreachable(error) from None

    def _line(self, response: HTTPResponse) -> bytes:
        try:
            return response.readline(LONGEST)
        except (OSError, HTTPException, ValueError):  # ValueError: the line of a chunk's size is none
            return b""

    def _document(self, response: HTTPResponse) -> dict[str, Any]:
        try:
            return self._object(response.read(LONGEST))
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from None

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise self.other_format() from None
        if not isinstance(value, dict):
            raise self.other_format()
        return value

    def other_format(self) -> ServerError:
        """What to raise for an answer that is not OpenAI's."""
        return ServerError(
            f"{self.url} does not answer as OpenAI's API does", "give the address of a server that does, as dsv4 serve"
        )

    def _unreachable(self, error: Exception) -> ServerError:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        kind = NoAnswer if isinstance(error, TimeoutError) else ServerError
        return kind(f"no server answers at {self.url}: {reason}", "start one with dsv4 serve, or correct the address")

    def _refusal(self, response: HTTPResponse, path: str) -> ServerError:
        status, said = response.status, _message(response) or response.reason
        if status == 401:
            what = "does not accept this API key" if self._key else "asks for an API key"
            return ServerError(f"{self.url} {what}", "write the key into a file, and name it with --api-key-file")
        if status in (429, 503):
            wait = response.headers.get("Retry-After", "")
            when = f"in {wait} s" if wait.isdecimal() else "in a moment"
            return ServerError(f"{self.url} is busy: {said}", f"ask again {when}")
        if status in range(300, 400):
            return ServerError(
                f"{self.url} redirects to {response.headers.get('Location', 'nowhere')}", "give that address"
            )
        if status == 404:
            return ServerError(f"{self.url} has no {path}: {said}", "give the address of a server with OpenAI's API")
        if status >= 500:
            return ServerError(f"{self.url} has failed ({status}): {said}", "its own log says why")
        return ServerError(f"{self.url} refuses this ({status}): {said}", "change what it names, or ask another server")


def _parts(url: str) -> Any:
    """The parts of an address. Raises UsageError."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError where it is no number
    except ValueError:
        parts = urlsplit("")
    plain = url.isprintable() and not {*url} & {" ", "@", "?", "#"}
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise UsageError(f"{url!r} is no address of a server", "write it as http://localhost:8000")
    return parts


def _message(response: HTTPResponse) -> str:
    """What a refusal says, in one of the forms that servers have; empty where it says nothing that can be read."""
    try:
        value = json.loads(response.read(LONGEST))
    except (OSError, HTTPException, ValueError, RecursionError):
        return ""
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return value if isinstance(value, str) else ""
