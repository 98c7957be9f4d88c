"""A server put together: the engine in its thread, the routes, the HTTP around them."""

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
from dsv4cli.engine.server.service import RequestDefaults, Service

# how long the event loop may keep the engine's thread from Python's lock: its usual 5 ms are a seventh of a step of 64
SWITCH_SECONDS = 5e-4


@dataclass(frozen=True)
class ServeOptions:
    """What is served, to whom, and how much of it. names: of the model, the first is that of answers. max_queue:
    requests that may wait beside those that run. grace: seconds that answers have to finish at the end."""

    dialogue: Dialogue
    names: tuple[str, ...]
    usual: RequestDefaults
    guard: Guard
    max_queue: int = 256
    grace: float = 30.0
    limits: HttpLimits = field(default_factory=HttpLimits)
    log_prompts: bool = False


def serving(
    engine: Engine,
    options: ServeOptions,
    log: Callable[[str], None],
    bug: Callable[[str], None],
    ready: Callable[[], None],
) -> tuple[AsyncEngine, HttpServer]:
    """The engine as the running event loop sees it, and its server, which is to be started. log: takes a line a
    request; bug: the traceback of an error that is ours; ready: called once clients can connect."""
    sys.setswitchinterval(SWITCH_SECONDS)
    metrics = Metrics()
    answering = AsyncEngine(
        engine, MAX_SLOTS + options.max_queue, metrics, lambda: len(server.server_state.connections), log
    )
    service = Service(options.dialogue, options.names, options.usual, answering, metrics, log, options.log_prompts)
    server = HttpServer(App(service, options.guard, bug), options.limits, options.grace, ready)
    return answering, server
