"""The engine for the event loop: calls of one or more requests, and their updates. Independent of HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter

from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.usage import Usage
from dsv4cli.engine.server.accounts import ANYONE, Account
from dsv4cli.engine.server.engine_thread import EngineThread, Update
from dsv4cli.engine.server.gathering import Gathering
from dsv4cli.engine.server.metrics import Metrics
from dsv4cli.engine.server.refusals import Refusal, refusal_of

# seconds without an update before a keep-alive is sent, to the client and any proxy in between
IDLE_SECONDS = 15
# how long to wait for a report, which comes after the current step
REPORT_SECONDS = 30
# how long no step may end before the server reports itself as unhealthy, unless it compiles: on a CPU the longest
# prefill chunk of a large model takes minutes
HUNG_SECONDS = 600.0
# tokens and alternatives buffered for a client that does not read: 5 to 10 MB
MOST_UNREAD = 1 << 15


class EngineCall:
    """A group of requests that belong to one client's HTTP request.

    Leaving the context cancels the requests that have not finished. So does a client that does not read its answer.

    Attributes:
        requests: all of its requests.
        open: the requests that have not finished.
        broken_off: True if requests were cancelled before they finished.
        first_token: seconds until the first token of an answer, None before.
    """

    def __init__(self, engine: "AsyncEngine", requests: Sequence[Request], account: Account = ANYONE) -> None:
        self.requests, self.open, self.broken_off = requests, set(requests), False
        self.first_token: float | None = None
        self._engine, self._account, self._began = engine, account, perf_counter()
        self._updates: list[Update] = []
        self._unread = 0
        self._arrived = asyncio.Event()

    def __enter__(self) -> "EngineCall":
        return self

    def __exit__(self, *_: object) -> None:
        self._break_off()

    def take(self, update: Update) -> None:
        """Buffer an update until `updates` is awaited.

        If the client leaves more than `MOST_UNREAD` tokens and alternatives unread, the call ends with status 408.
        """
        self._updates.append(update)
        self._arrived.set()
        self._account.charge(len(update.tokens))
        if update.tokens and self.first_token is None:
            self.first_token = update.time - self._began
        self._unread += sum(1 + len(token.top) for token in update.tokens)
        if self._unread > MOST_UNREAD and self.open:
            self._break_off()
            slow = Refusal(408, "the client did not read the answer in time")
            self._updates = [Update(update.request, update.time, [], error=slow, ended=True)]

    async def updates(self) -> list[Update]:
        """Return the updates since the last call, or an empty list after `IDLE_SECONDS` without any.

        Raises:
            Refusal: a request has failed.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                await self._arrived.wait()
        self._arrived.clear()
        updates, self._updates, self._unread = self._updates, [], 0
        for update in updates:
            if update.ended:
                self.open.discard(update.request)
            if update.error is not None:
                raise refusal_of(update.error)
        return updates

    def nudge(self) -> None:
        """Make `updates` return at once, even if it has no updates. A stream then writes a keep-alive."""
        self._arrived.set()

    def finish(self, request: Request) -> None:
        """End a request before the next step, because its answer is complete. Does nothing if it has already ended."""
        self._leave(request, "finished")

    def _break_off(self) -> None:
        self.broken_off |= bool(self.open)
        for request in list(self.open):
            self._leave(request, "cancelled")

    def _leave(self, request: Request, outcome: str) -> None:
        self.open.discard(request)
        self._engine.cancel(request, outcome)


class AsyncEngine:
    """An engine in its own thread, used from the running event loop.

    Attributes:
        most: maximum number of requests that may be running or queued.
        max_request_tokens: maximum tokens of a prompt and its answer that the KV cache holds; None for no limit.
        hung_seconds: how long no step may end before the engine counts as hanging.
        failure: resolves to the exception that stopped the engine, if it fails.
    """

    def __init__(
        self, engine: Engine, most: int, metrics: Metrics, connected: Callable[[], int], log: Callable[[str], None]
    ) -> None:
        """Start the engine's thread.

        Args:
            connected: returns the number of open client connections.
            log: called with each log line about the server.
        """
        self._loop = asyncio.get_running_loop()
        self.most, self._metrics = most, metrics
        self.max_request_tokens = engine.max_request_tokens
        self.hung_seconds = HUNG_SECONDS
        self._calls: dict[Request, EngineCall] = {}
        self._last_step = perf_counter()  # the end of the last step, or when the engine got work after that
        self.failure: asyncio.Future[Exception] = self._loop.create_future()
        self._thread = EngineThread(engine, self._deliver, self.fail, lambda text: self._say(log, text))
        self._thread.start()
        self._gathering = Gathering(lambda: connected() - len({*self._calls.values()}), self._thread.add)

    @property
    def hangs(self) -> str | None:
        """Why the engine seems to hang, None if it does not. Steps may take longer if they compile kernels."""
        step, since = self._thread.seconds, perf_counter() - self._last_step
        if step > self.hung_seconds:
            return f"its current step has run for {step:.0f} s"
        if self._calls and since > self.hung_seconds and not self._thread.preparing:
            return f"no step has ended for {since:.0f} s, though requests are running"
        return None

    async def report(self) -> tuple[Usage, DraftReport | None]:
        """Return the engine's usage and its draft statistics, after the current step.

        Raises:
            Refusal: the engine has not answered within `REPORT_SECONDS`.
        """
        found: asyncio.Future[tuple[Usage, DraftReport | None]] = self._loop.create_future()

        def take(usage: Usage, drafts: DraftReport | None) -> None:
            self._loop.call_soon_threadsafe(tell, (usage, drafts))

        def tell(report: tuple[Usage, DraftReport | None]) -> None:
            if not found.done():
                found.set_result(report)

        self._thread.report(take)
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                return await found
        except TimeoutError:
            raise Refusal(503, "the engine does not respond") from None

    def call(self, requests: Sequence[Request], account: Account) -> EngineCall:
        """Submit requests to the engine, on account of an API key.

        Raises:
            Refusal: the engine has failed, or the queue cannot hold all of the requests.
        """
        if self.failure.done():
            raise Refusal(503, "the engine has failed, and the server is shutting down")
        if len(self._calls) + len(requests) > self.most:
            raise Refusal(
                503, f"the queue is full: {len(self._calls):,} requests are running or waiting; try again later"
            )
        call = EngineCall(self, requests, account)
        # answers to one prompt share its list of ids
        account.charge(sum({id(one.prompt): len(one.prompt) for one in requests}.values()))
        rests = not self._calls or self._gathering.holds
        self._last_step = self._last_step if self._calls else perf_counter()
        for request in requests:
            request.cache_scope = account.scope
            self._calls[request] = call
            self._metrics.begin(request)
        (self._gathering if rests else self._thread).add(requests)
        return call

    def cancel(self, request: Request, outcome: str) -> None:
        """End a request before the next step. Does nothing if it has already ended.

        Args:
            outcome: finished, cancelled or failed, for `Metrics.end`.
        """
        if self._calls.pop(request, None) is not None:
            self._metrics.end(request, outcome)
            if not self._gathering.drop(request):
                self._thread.cancel(request)

    def fail(self, error: Exception) -> None:
        """End every request with an error, accept no more, and resolve `failure`. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._end_all, error)

    def close(self, seconds: float) -> bool:
        """Stop the thread after the current step. Return True if it stopped within `seconds`."""
        return self._thread.close(seconds)

    def _deliver(self, updates: list[Update]) -> None:
        self._loop.call_soon_threadsafe(self._hand_out, updates)

    def _say(self, log: Callable[[str], None], text: str) -> None:
        self._loop.call_soon_threadsafe(log, text)

    def _hand_out(self, updates: list[Update]) -> None:
        self._last_step = perf_counter()
        for update in updates:
            call = self._calls.get(update.request)
            if call is None:
                continue  # it has been cancelled in the meantime
            self._metrics.note(update)
            call.take(update)
            # `take` may have cancelled the call, if the client does not read
            if update.ended and self._calls.pop(update.request, None) is not None:
                self._metrics.end(update.request, "failed" if update.error else "finished")

    def _end_all(self, error: Exception) -> None:
        if not self.failure.done():
            self._hand_out([Update(request, 0.0, [], error=error, ended=True) for request in list(self._calls)])
            self.failure.set_result(error)
