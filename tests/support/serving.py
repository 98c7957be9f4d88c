"""A server in a thread of this process, and a client that sees what goes over the wire."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from dsv4cli.engine.chat.dialogue import Dialogue, open_dialogue
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.usage import Usage
from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.async_engine import AsyncEngine
from dsv4cli.engine.server.build import ServeOptions, build_server
from dsv4cli.engine.server.guard import Guard
from dsv4cli.engine.server.http import HttpServer, bound_socket
from dsv4cli.engine.server.service import RequestDefaults
from dsv4cli.engine.server.warm import CacheOptions, ready_engine
from dsv4cli.engine.settings import AUTO_DRAFTING, Limits, Sampling
from tests.support.shared_models import shared_model
from tests.support.waiting import comes as comes

NO_KEYS = Accounts()
GREEDY = Sampling(0.0)
USUAL = Limits(max_tokens=64)
SHARE = CacheOptions(64 << 20, 50.0)
# seconds; pytest's own limit shows the stacks of what hangs, and comes first for a default test. A busy machine may
# take minutes for one of many requests
PATIENCE = 1500


@dataclass
class Served:
    """A running server. lines: its log; bugs: tracebacks of errors that are its own."""

    engine: Engine
    asked: AsyncEngine
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    port: int
    lines: list[str]
    bugs: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPResponse:
        """A response, of which the body has not been read."""
        connection = self.connect()
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, content, {"connection": "close"} | headers)
        return connection.getresponse()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """The status and the JSON document, or the text."""
        return _read(self.send("GET", path, **headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        return _read(self.send("POST", path, body, **headers))

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """The document of an answer to one message."""
        status, document = self.post("/v1/chat/completions", asking(content, **fields))
        assert status == 200, document
        return document

    def stream(self, path: str, body: Any, **headers: str) -> list[tuple[str, Any]]:
        """The events of a stream: their names and their data."""
        response = self.send("POST", path, {**body, "stream": True}, **headers)
        assert response.status == 200, response.read()
        assert (response.getheader("content-type") or "").startswith("text/event-stream")
        return events_of(response.read().decode())

    def at_rest(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.engine.busy and not self.asked._calls

    def tasks(self) -> int:
        """How many tasks the event loop has, this one not among them."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(60)

    def held(self) -> Usage:
        """What the engine holds."""
        return asyncio.run_coroutine_threadsafe(self.asked.report(), self.loop).result(60)[0]


def asking(content: str, **fields: Any) -> dict[str, Any]:
    """A body of one message."""
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def events_of(text: str) -> list[tuple[str, Any]]:
    """The server-sent events of a text, less comments."""
    found = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.split("\n") if line and not line.startswith(":")]
        fields = {name: value for name, _, value in lines}
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def _read(response: HTTPResponse) -> tuple[int, Any]:
    content = response.read().decode()
    is_json = (response.getheader("content-type") or "").startswith("application/json")
    return response.status, json.loads(content) if is_json else content


@contextmanager
def served(model: str = "nano", accounts: Accounts = NO_KEYS, think: str = "off", **offered: Any) -> Iterator[Served]:
    """A server for a model, by its name; its answers are greedy where a request does not say otherwise."""
    dialogue, loaded = open_dialogue(resolve_model(model), think), shared_model(model)
    limits, share = offered.get("own_limits", USUAL), offered.pop("share", SHARE)
    made = ready_engine(loaded, share, limits, "cpu", None, AUTO_DRAFTING, lambda _: None)
    with made as engine, serving(dialogue, engine, model, accounts, think, **offered) as one:
        yield one


@contextmanager
def serving(
    dialogue: Dialogue, engine: Any, model: str, accounts: Accounts = NO_KEYS, think: str = "off", **offered: Any
) -> Iterator[Served]:
    """A server for an engine."""
    limits = offered.pop("own_limits", USUAL)
    offer = ServeOptions(
        dialogue,
        (model,),
        RequestDefaults(think, GREEDY, None, limits),
        Guard(accounts, "127.0.0.1"),
        **offered,
    )
    ready, made = threading.Event(), []
    lines: list[str] = []
    bugs: list[str] = []

    async def run() -> None:
        with bound_socket("127.0.0.1", 0) as bound:
            asked, server = build_server(engine, offer, lines.append, bugs.append, ready.set)
            made.append(Served(engine, asked, server, asyncio.get_running_loop(), bound.getsockname()[1], lines, bugs))
            await server.serve([bound])
            assert asked.close(60)

    thread = threading.Thread(target=asyncio.run, args=[run()], daemon=True)
    thread.start()
    assert ready.wait(60)
    [one] = made
    try:
        yield one
    finally:
        with suppress(RuntimeError):  # it has ended already
            one.loop.call_soon_threadsafe(one.server.stop)
        thread.join(60)
        assert not thread.is_alive()
    assert bugs == []
