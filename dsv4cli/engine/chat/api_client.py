"""Client of a server with OpenAI's API, and error messages for its refusals. Does not import torch."""

import json
import re
import socket
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from dsv4cli.errors import ServerError, UsageError

LONGEST_WAIT = 10  # seconds to connect, and between two parts of a document; streams have no limit
# the most bytes of a document, or of a line of a stream
LONGEST = 1 << 24
DATA, DONE = b"data:", b"[DONE]"
# statuses of a server without capacity, and of a proxy that cannot reach the server
BUSY, UNREACHED = (429, 503), (502, 504)


class NoAnswer(ServerError):
    """A server does not respond in time."""


class NoConnection(ServerError):
    """A server does not accept a connection."""


class ConnectionLost(ServerError):
    """A connection to a server broke off."""


class ServerBusy(ServerError):
    """A server has no capacity for a request.

    Attributes:
        wait: seconds after which the server wants a retry, None if it does not say.
    """

    wait: float | None = None


class RequestRejected(ServerError):
    """A server does not accept this request, but may accept others."""


class StreamEnded(Exception):
    """The connection of a stream was closed before the last event."""


# the end of a URL as it is in a curl command or in the settings of a client
_API_PATH = re.compile(r"/v1(/(chat/completions|completions|messages|responses|models))?$")


@dataclass(frozen=True)
class RawResponse:
    """A response of any status, as it arrived.

    Attributes:
        headers: by lowercase name.
        complete: False if the connection was closed before the announced end.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


class ApiClient:
    """A server at a URL such as `http://localhost:8000`, with or without an API path. It sends one request at a time.

    Redirects are not followed, so that the API key is never sent to another host.
    """

    def __init__(self, url: str, key: str = "") -> None:
        """Parse the URL. Raises UsageError if it is invalid."""
        self.url = _API_PATH.sub("", url.rstrip("/"))
        self._key = key
        self._parts = _parts(self.url)
        self._socket: socket.socket | None = None  # the last request's

    def get(self, path: str) -> dict[str, Any]:
        """Return a JSON document. Raises ServerError."""
        with self._response("GET", path, wait=LONGEST_WAIT) as response:
            return self._document(response)

    def post(self, path: str, body: Mapping[str, Any], *, patient: bool = False) -> dict[str, Any]:
        """Send a JSON document, and return the response document. Raises ServerError.

        Args:
            patient: wait for the response without a limit, not LONGEST_WAIT.
        """
        with self._response("POST", path, body, None if patient else LONGEST_WAIT) as response:
            return self._document(response)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed response.

        Raises:
            ServerError: the server cannot be reached, refuses the request, or uses another format.
            StreamEnded: the connection was closed before the last event.
        """
        with self._response("POST", path, body) as response:
            while line := self._line(response):
                if not line.startswith(DATA):
                    continue
                data = line.removeprefix(DATA).strip()
                if data == DONE:
                    return
                yield self._object(data)
        raise StreamEnded

    def exchange(
        self, method: str, path: str, content: bytes | None, seconds: float, most: int = LONGEST
    ) -> RawResponse:
        """Send a request, and return the response whatever its status.

        Args:
            content: the body, which need not be valid JSON; None sends no body.
            seconds: maximum seconds until the whole response has arrived.
            most: read at most this many bytes, then close the connection, which cancels the request.

        Raises:
            NoAnswer: the response is not complete in time.
            ServerError: the server cannot be reached, or closes the connection without a response.
        """
        end = monotonic() + seconds
        connection = self._connection()
        with closing(connection), closing(self._answered(connection, method, path, content, seconds)) as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            body, complete = b"", True
            try:
                while len(body) < most and (piece := response.read1(min(most - len(body), 1 << 16))):
                    body += piece
                    left = end - monotonic()
                    if left <= 0:
                        raise TimeoutError(f"no complete response within {seconds:g} s")
                    self._limit_wait(left)
            except TimeoutError as error:
                raise self._unreachable(error) from None
            except (OSError, HTTPException, ValueError):  # ValueError: invalid chunk size
                complete = False
            announced = headers.get("content-length", "")
            if announced.isdecimal() and len(body) < min(int(announced), most) and method != "HEAD":
                complete = False
            return RawResponse(response.status, headers, body, complete)

    def _limit_wait(self, seconds: float) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it is already closed
                self._socket.settimeout(seconds)

    def close(self) -> None:
        """Abort the running request, from any thread or signal handler. Its reader sees the end of the connection."""
        if self._socket is not None:
            with suppress(OSError):  # it is already closed
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, wait: float | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request.

        Args:
            wait: maximum seconds between two parts of the response, None for no limit.
        """
        connection = self._connection()
        content = None if body is None else json.dumps(body).encode()
        with closing(connection), closing(self._answered(connection, method, path, content, wait)) as response:
            if response.status != 200:
                raise self._refusal(response, path)
            yield response

    def _connection(self) -> HTTPConnection:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=LONGEST_WAIT)

    def _answered(
        self, connection: HTTPConnection, method: str, path: str, content: bytes | None, wait: float | None
    ) -> HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
        except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: invalid host name
            raise self._unreachable(error, NoConnection) from None
        try:
            connection.sock.settimeout(wait)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detect hosts that disappear
            self._socket = connection.sock
            connection.request(method, f"{self._parts.path}{path}", content, headers)
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from None

    def _line(self, response: HTTPResponse) -> bytes:
        try:
            return response.readline(LONGEST)
        except (OSError, HTTPException, ValueError):  # ValueError: invalid chunk size
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
        """Return the error for a response that is not in OpenAI's format."""
        return ServerError(
            f"{self.url} does not respond as OpenAI's API does", "use the URL of a server that does, such as dsv4 serve"
        )

    def _unreachable(self, error: Exception, kind: type[ServerError] = ServerError) -> ServerError:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        if kind is NoConnection:
            remedy = "start one with dsv4 serve, or correct the URL"
            if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
                remedy = "the server does not use TLS: write http:// instead of https://"
            return kind(f"cannot reach a server at {self.url}: {reason}", remedy)
        if isinstance(error, TimeoutError):
            return NoAnswer(f"{self.url} did not respond in time: {reason}", "try again; see also the server's log")
        return ConnectionLost(
            f"the connection to {self.url} was lost: {reason}", "try again, or correct the URL; see the server's log"
        )

    def _refusal(self, response: HTTPResponse, path: str) -> ServerError:
        status, said = response.status, _message(response) or response.reason
        if status == 401:
            what = "rejects this API key" if self._key else "requires an API key"
            return ServerError(f"{self.url} {what}", "write the key to a file, and pass it with --api-key-file")
        if status in BUSY:
            wait = response.headers.get("Retry-After", "")
            when = f"in {wait} s" if wait.isdecimal() else "in a moment"
            busy = ServerBusy(f"{self.url} is busy: {said}", f"try again {when}")
            busy.wait = float(wait) if wait.isdecimal() else None
            return busy
        if status in range(300, 400):
            return ServerError(f"{self.url} redirects to {response.headers.get('Location', 'nowhere')}", "use that URL")
        if status == 404:
            return ServerError(f"{self.url} has no {path}: {said}", "use the URL of a server with OpenAI's API")
        if status >= 500:
            kind = ServerBusy if status in UNREACHED else ServerError
            return kind(f"{self.url} has failed ({status}): {said}", "see the server's log")
        return RequestRejected(
            f"{self.url} rejects the request ({status}): {said}", "change the request, or use another server"
        )


def _parts(url: str) -> Any:
    """Return the parts of a URL. Raises UsageError if it is invalid."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError:
        parts = urlsplit("")
    plain = url.isprintable() and not {*url} & {" ", "@", "?", "#"}
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise UsageError(f"{url!r} is not the URL of a server", "use a URL such as http://localhost:8000")
    return parts


def _message(response: HTTPResponse) -> str:
    """Return the message of an error response in any of the common formats, or "" if it has none."""
    try:
        value = json.loads(response.read(LONGEST))
    except (OSError, HTTPException, ValueError, RecursionError):
        return ""
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return value if isinstance(value, str) else ""
