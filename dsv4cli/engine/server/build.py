"""Assembly of a server: the engine in its thread, the routes, and the HTTP server."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.server.app import App
from dsv4cli.engine.server.async_engine import HUNG_SECONDS, AsyncEngine
from dsv4cli.engine.server.connections import HttpLimits
from dsv4cli.engine.server.guard import Guard
from dsv4cli.engine.server.http import HttpServer
from dsv4cli.engine.server.metrics import Metrics
from dsv4cli.engine.server.response_store import ResponseStore
from dsv4cli.engine.server.service import RequestDefaults, Service
from dsv4cli.version import __version__

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
        root_path: path below which a reverse proxy offers the server, without a slash at the end.
        hung_seconds: seconds without a finished step, while requests run, after which /health returns 503.
        store: whether responses of the Responses API are stored, so that clients can continue them.
    """

    dialogue: Dialogue
    names: tuple[str, ...]
    defaults: RequestDefaults
    guard: Guard
    max_queue: int = 256
    grace: float = 30.0
    limits: HttpLimits = field(default_factory=HttpLimits)
    log_prompts: bool = False
    store: bool = True
    root_path: str = ""
    hung_seconds: float = HUNG_SECONDS


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
        options.dialogue, options.names, options.defaults, answering, metrics, log, options.log_prompts,
        ResponseStore() if options.store else None,
    )  # fmt: skip
    answering.hung_seconds = options.hung_seconds
    metrics.describe(*_description(service, options, engine.max_request_tokens))
    server = HttpServer(App(service, options.guard, bug, options.root_path), options.limits, options.grace, ready)
    return answering, server


def _description(
    service: Service, options: ServeOptions, cache_tokens: int | None
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the labels of the metric `dsv4_info`, and the server's capacity."""
    info = {"version": __version__, "model": service.names[0], "release": service.dialogue.release}
    capacity = {"running_requests": MAX_SLOTS, "queued_requests": options.max_queue, "context_tokens": service.context}
    return info, capacity | ({} if cache_tokens is None else {"cache_tokens": cache_tokens})
