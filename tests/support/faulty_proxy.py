"""A proxy in front of a right server that does one thing wrong, as servers in the field do."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHAT, DONE = "/v1/chat/completions", "[DONE]"
Json = dict[str, Any]


@dataclass
class Passing:
    """A request on its way: what was sent and, later, what came back; faults change both.

    document: of a whole response. events: of a stream, `[DONE]` as that text. status 0: nothing is sent back.
    wants_thinking: for faults that change the thinking mode.
    """

    path: str
    body: Json
    status: int = 200
    document: Json | None = None
    events: list[Any] = field(default_factory=list)
    wants_thinking: bool = True

    @property
    def text(self) -> str:
        """The last message."""
        messages = self.body.get("messages") or [{}]
        return str(messages[-1].get("content")) if isinstance(messages, list) and messages else ""

    def messages(self) -> Iterator[Json]:
        """The messages of the answer, whole ones or deltas."""
        for part in [self.document, *self.events]:
            for choice in (part.get("choices") or ()) if isinstance(part, dict) else ():
                yield choice.get("message") or choice.get("delta") or {}

    def choices(self) -> Iterator[Json]:
        """The choices of the answer and of its events."""
        for part in [self.document, *self.events]:
            yield from (part.get("choices") or ()) if isinstance(part, dict) else ()

    def usages(self) -> Iterator[Json]:
        """Every usage."""
        for part in [self.document, *self.events]:
            if isinstance(part, dict) and isinstance(part.get("usage"), dict):
                yield part["usage"]


def nothing(passing: Passing, proxy: "FaultyProxy") -> None:
    """Changes nothing."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    check: which check names it. before: changes the request; after: changes the response. whole: it needs more than
    the quick checks. pause: seconds between the events of a stream, so that a client can leave before its end.
    """

    name: str
    check: str
    before: Callable[[Passing, "FaultyProxy"], None] = nothing
    after: Callable[[Passing, "FaultyProxy"], None] = nothing
    whole: bool = False
    pause: float = 0.0


class FaultyProxy:
    """Forwards everything to a port of this machine. seen: for faults that remember. cancelled: a client has left."""

    def __init__(self, port: int, fault: Fault) -> None:
        self.port, self.fault = port, fault
        self.seen: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.running = 0
        self.cancelled = False
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.answer(self, "GET", b"")

            def do_POST(self) -> None:
                proxy.answer(self, "POST", self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["FaultyProxy"]:
        """Serves until the end."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, handler: BaseHTTPRequestHandler, method: str, content: bytes) -> None:
        """Forwards one request, and sends its response with the fault."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        passing = Passing(handler.path, body if isinstance(body, dict) else {})
        with self.lock:
            self.running += 1
        try:
            self.fault.before(passing, self)
            if isinstance(body, dict):
                content = json.dumps(passing.body).encode()
            raw = self._forward(method, handler.path, content, passing)
            self.fault.after(passing, self)
        finally:
            with self.lock:
                self.running -= 1
        try:
            self._send(handler, passing, raw)
        except OSError:
            self.cancelled = True

    def _forward(self, method: str, path: str, content: bytes, passing: Passing) -> bytes:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request(method, path, content or None, {"connection": "close"})
        response: HTTPResponse = connection.getresponse()
        raw = response.read()
        connection.close()
        passing.status = response.status
        if (response.getheader("content-type") or "").startswith("text/event-stream"):
            data = [line[5:].strip() for line in raw.decode().splitlines() if line.startswith("data:")]
            passing.events = [DONE if one == DONE else json.loads(one) for one in data]
        elif (response.getheader("content-type") or "").startswith("application/json"):
            passing.document = json.loads(raw)
        return raw

    def _send(self, handler: BaseHTTPRequestHandler, passing: Passing, raw: bytes) -> None:
        if passing.status == 0:
            threading.Event().wait(3)
            return
        handler.send_response(passing.status)
        if passing.events:
            handler.send_header("Content-Type", "text/event-stream")
            handler.end_headers()
            for event in passing.events:
                data = event if event == DONE else json.dumps(event)
                handler.wfile.write(f"data: {data}\n\n".encode())
                handler.wfile.flush()
                threading.Event().wait(self.fault.pause)
            return
        content = raw if passing.document is None else json.dumps(passing.document).encode()
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)


def on_chat(change: Callable[[Passing], object]) -> Callable[[Passing, FaultyProxy], None]:
    """A change of chat requests, or of answers to them."""

    def changed(passing: Passing, proxy: FaultyProxy) -> None:
        if passing.path == CHAT:
            change(passing)

    return changed


def on_answers(change: Callable[[Passing], object]) -> Callable[[Passing, FaultyProxy], None]:
    """A change of chat answers that are no refusals."""
    return on_chat(lambda passing: change(passing) if passing.status == 200 else None)


def copied(value: Any) -> Any:
    """A copy that a fault may keep."""
    return deepcopy(value)
