"""Assembly of a server: the engine in its thread, the routes, and the HTTP server."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.server.app import App
from dsv4cli.engine.server.async_engine import AsyncEngine
from dsv4cli.engine.server.connections import HttpLimits
from dsv4cli.engine.server.guard import Guard
from dsv4cli.engine.server.http import HttpServer
from dsv4cli.engine.server.metrics import Metrics
from dsv4cli.engine.server.response_store import ResponseStore
from dsv4cli.engine.server.service import RequestDefaults, Service

# how long the event loop may keep the GIL from the engine's thread: Python's default of 5 ms is a seventh of a decode
# step of 64 sequences
SWITCH_SECONDS = 5e-4


@dataclass(frozen=True)
class ServeOptions:
    """What a server offers to clients, and its limits.

    Attributes:
        names: the model's names; responses use the first.
        max_queue: requests that may wait in the queue, in addition to the running ones.
        grace: seconds that answers have to finish when the server stops.
        store: whether responses of the Responses API are stored, so that clients can continue them.
    """

    dialogue: Dialogue
    names: tuple[str, ...]
    usual: RequestDefaults
    guard: Guard
    max_queue: int = 256
    grace: float = 30.0
    limits: HttpLimits = field(default_factory=HttpLimits)
    log_prompts: bool = False
    store: bool = True


def build_server(
    engine: Engine,
    options: ServeOptions,
    log: Callable[[str], None],
    bug: Callable[[str], None],
    ready: Callable[[], None],
) -> tuple[AsyncEngine, HttpServer]:
    """Return the engine for the running event loop, and the HTTP server, which has not been started.

    Args:
        log: called with one line per request.
        bug: called with the traceback of an unexpected error.
        ready: called once clients can connect.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    metrics = Metrics()
    answering = AsyncEngine(
        engine, MAX_SLOTS + options.max_queue, metrics, lambda: len(server.server_state.connections), log
    )
    service = Service(
        options.dialogue, options.names, options.usual, answering, metrics, log, options.log_prompts,
        ResponseStore() if options.store else None,
    )  # fmt: skip
    server = HttpServer(App(service, options.guard, bug), options.limits, options.grace, ready)
    return answering, server
