"""The life of a server: load the model, report progress, serve, and shut down on signals."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dsv4cli.commands.job import Clients, Job
from dsv4cli.commands.ranks import left_by, opened_in_ranks
from dsv4cli.commands.serve.access import Address
from dsv4cli.commands.serve.hang_up import HangUp
from dsv4cli.errors import Dsv4Error, RankLost
from dsv4cli.output import Output, ReaderGone, duration_text

if TYPE_CHECKING:
    from dsv4cli.engine.model.transformer import Transformer
    from dsv4cli.engine.runtime.engine import Engine
    from dsv4cli.engine.server.async_engine import AsyncEngine
    from dsv4cli.engine.server.build import ServeOptions
    from dsv4cli.engine.server.guard import Guard
    from dsv4cli.engine.server.http import HttpServer
    from dsv4cli.engine.server.warm import CacheOptions

LOST_RANK = "check whether the machine ran out of memory, then restart the server"
# seconds to wait for the running step at shutdown
LAST_STEP_SECONDS = 5


@dataclass(frozen=True)
class Policy:
    """Access rules, limits and defaults for clients.

    Attributes:
        guard: Checks API keys and hosts.
        share: Memory of the KV cache, and the latency target.
        names: Model names for clients; empty for the model's own name.
        max_queue: Maximum number of queued requests.
        grace: Seconds that running answers have to finish at shutdown.
        seed: Seed of requests without one; None for a random seed.
        reasoning_fields: Fields of the reasoning in OpenAI API responses.
        log_prompts: Print each prompt to stderr.
        store: Store responses of the Responses API.
        key_file: File of API keys, which SIGHUP rereads.
        root_path: Path below which a reverse proxy offers the server.
        hung_seconds: Seconds without a finished step after which /health returns 503.
        log_json: Log JSON objects instead of text.
    """

    guard: "Guard"
    share: "CacheOptions"
    names: tuple[str, ...]
    max_queue: int
    grace: float
    seed: int | None
    reasoning_fields: tuple[str, ...]
    log_prompts: bool
    store: bool
    key_file: Path | None
    root_path: str
    hung_seconds: float
    log_json: bool

    def warn(self, out: Output) -> None:
        """Print what is dangerous about the access rules."""
        from dsv4cli.engine.server.guard import is_loopback
        from dsv4cli.engine.server.request_log import log_text

        host, warnings = self.guard.host, list[str]()
        if not self.guard.accounts.required:
            if host is not None and not is_loopback(host):
                warnings.append(
                    f"anyone who can reach {host} can use this server; to require a key, use --api-key-file"
                )
            if "*" in self.guard.origins:
                warnings.append("any web page that you open can use this server; to require a key, use --api-key-file")
        for warning in warnings:
            if self.log_json:
                out.log(log_text(f"warning: {warning}", as_json=True))
            else:
                out.warning(warning)

    def offer(self, job: Job) -> "ServeOptions":
        """Return the options of the server for this job: model names, request defaults and limits."""
        from dsv4cli.engine.server.build import ServeOptions
        from dsv4cli.engine.server.service import RequestDefaults

        name = job.source.name
        own = PurePath(name).name if os.path.isdir(name) else name  # the folder's name, not its path
        defaults = RequestDefaults(job.think, job.sampling, self.seed, job.limits, self.reasoning_fields)
        return ServeOptions(
            job.dialogue, self.names or (own,), defaults, self.guard, self.max_queue, self.grace,
            log_prompts=self.log_prompts, store=self.store, root_path=self.root_path, hung_seconds=self.hung_seconds,
        )  # fmt: skip


def serve_model(job: Job, ranks: int, address: Address, policy: Policy, start: float) -> int:
    """Serve until a signal arrives, and return the exit code. Raises Dsv4Error.

    Args:
        start: time.perf_counter() at the start of the program.
    """
    from dsv4cli.engine.server import build  # noqa: F401 - before loading, so that no import is left for later

    running = Running(job, policy, start)
    _ = running.job.dialogue  # raises before the model is loaded, as a taken address does
    engine_of = partial(_engine_of, policy.share)
    with address.bound() as bound, opened_in_ranks(running.job, ranks, LOST_RANK, engine_of) as engine:
        return asyncio.run(running.serve(engine, bound))


def _engine_of(share: "CacheOptions", job: Job, model: "Transformer") -> "AbstractContextManager[Engine]":
    """Return an engine for many clients, warmed up with its first steps."""
    from dsv4cli.engine.server.warm import ready_engine

    return ready_engine(model, share, job.limits, job.device, job.process.followers, job.drafting, job.out.compiling)


class Running:
    """A server from its start to its shutdown, with its job set up for many clients."""

    def __init__(self, job: Job, policy: Policy, start: float) -> None:
        from dsv4cli.engine.config.capacity import MAX_SLOTS

        clients = Clients(MAX_SLOTS, policy.share.cache_memory)
        self.job = replace(job, clients=clients, process=replace(job.process, loaded=self._note_weights))
        self._out, self._policy = job.out, policy
        self._start = self._weights = start
        self._number = 0  # number of the signal that shuts the server down
        self._clients_told = Event()  # whether all answers have ended
        self._leave = left_by(job.out)
        self._hang_up = HangUp(policy.key_file, policy.guard.accounts, self._say)
        self._hang_up.stand_by()

    async def serve(self, engine: "Engine", bound: socket.socket) -> int:
        """Answer clients until a signal arrives, and return the exit code. Raises the engine's error if it fails."""
        from dsv4cli.engine.server.build import build_server

        answering, server = build_server(
            engine, self._policy.offer(self.job), self._log, self._confess, lambda: self._begin(bound)
        )
        self._handle_signals(server)
        if engine.followers is not None:
            engine.followers.say_farewell(partial(self._tell_clients, answering))
        running = asyncio.create_task(server.serve([bound]))
        ends: set[asyncio.Future[Any]] = {running, answering.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if answering.failure.done():
            server.stop()
            await asyncio.wait({running}, timeout=LAST_STEP_SECONDS)
            self._clients_told.set()
            error = answering.failure.result()
            if isinstance(error, RankLost):
                await asyncio.sleep(LAST_STEP_SECONDS)  # the thread that watches the ranks reports it and ends here
            raise error
        await running
        self._clients_told.set()
        if not answering.close(LAST_STEP_SECONDS):
            self._leave_now()
        return 128 + self._number

    def _tell_clients(self, answering: "AsyncEngine", error: RankLost) -> None:
        """End all answers with an error, and wait until clients have received it. Called in another thread."""
        with suppress(RuntimeError):  # the event loop has ended, and so have all answers
            answering.fail(error)
        self._clients_told.wait(2 * LAST_STEP_SECONDS)

    def _handle_signals(self, server: "HttpServer") -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number, server)

        def end_or_reread() -> None:
            if self._hang_up.handle():
                self._end(signal.SIGHUP, server)

        if self._hang_up.wanted:
            loop.add_signal_handler(signal.SIGHUP, end_or_reread)

    def _note_weights(self) -> None:
        self._weights = perf_counter()

    def _say(self, text: str) -> None:
        """Print a message to whoever has started the server. In the log of a program, it is one of its entries."""
        if self._policy.log_json:
            self._log(text)
        else:
            self._print(self._out.status, text)

    def _log(self, line: str) -> None:
        """Print a line of the log."""
        from dsv4cli.engine.server.request_log import log_text

        as_json = self._policy.log_json
        self._print(self._out.log if as_json else self._out.status, log_text(line, as_json=as_json))

    def _print(self, write: Callable[[str], None], text: str) -> None:
        with suppress(ReaderGone):  # clients are still served if nobody reads the log
            write(text)

    def _confess(self, traceback: str) -> None:
        """Print an internal error. The server keeps running."""
        if self._policy.log_json:
            self._log(f"a request failed because of a bug in dsv4: {traceback}")
            return
        with suppress(ReaderGone):
            what, remedy = "a request failed because of a bug in dsv4", "please report it with the lines above"
            self._out.error(Dsv4Error(what, remedy, traceback.splitlines()))

    def _begin(self, bound: socket.socket) -> None:
        """Announce that the server is ready. Called once clients can connect."""
        from dsv4cli.engine.server.warm import spare_what_is_there

        self._say_ready(bound)
        spare_what_is_there()  # after printing the address, so that it does not delay startup

    def _say_ready(self, bound: socket.socket) -> None:
        from dsv4cli.engine.server.http import url_of

        now = perf_counter()
        after, all_of_it = duration_text(now - self._weights), duration_text(now - self._start)
        self._say(f"ready in {all_of_it} ({after} after loading the weights); press Ctrl-C to stop")
        self._out.line(url_of(bound))

    def _end(self, number: int, server: "HttpServer") -> None:
        if self._number:
            if number == signal.SIGHUP:  # the shell and the kernel each send one
                return
            self._leave_now()
        self._number = number
        self._say(f"running answers have {self._policy.grace:g} s to finish; press Ctrl-C again to stop at once")
        server.stop()

    def _leave_now(self) -> None:
        self._leave(self._number)
        os._exit(128 + self._number)
