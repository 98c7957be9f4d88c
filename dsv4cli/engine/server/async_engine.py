"""The engine as the event loop sees it: calls of clients, of one or several requests, and what they get; no HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.usage import Usage
from dsv4cli.engine.server.engine_thread import EngineThread, Update
from dsv4cli.engine.server.gathering import Gathering
from dsv4cli.engine.server.metrics import Metrics
from dsv4cli.engine.server.refusals import Refusal, refusal_of

# after so many seconds without news a client is told that it waits, and what stands between knows that it lives
IDLE_SECONDS = 15
# how long a step may take before the engine is said not to answer
REPORT_SECONDS = 30
# how long a step that compiles nothing may take before the server counts as unhealthy: the longest chunk of a prompt
# takes minutes where a CPU computes a large model
HUNG_SECONDS = 600.0
# tokens, each with its alternatives, that wait for a client which does not read: 5 to 10 MB
MOST_UNREAD = 1 << 15


class EngineCall:
    """Requests of one client that are answered together. Leaving it cancels those that have not ended, as does a client
    that does not read.

    open: those; broken_off: whether there were some then.
    """

    def __init__(self, engine: "AsyncEngine", requests: Sequence[Request]) -> None:
        self._engine, self.open, self.broken_off = engine, set(requests), False
        self._updates: list[Update] = []
        self._unread = 0
        self._arrived = asyncio.Event()

    def __enter__(self) -> "EngineCall":
        return self

    def __exit__(self, *_: object) -> None:
        self._break_off()

    def take(self, update: Update) -> None:
        """Keeps what has come for a client that has not asked yet."""
        self._updates.append(update)
        self._arrived.set()
        self._unread += sum(1 + len(token.top) for token in update.tokens)
        if self._unread > MOST_UNREAD and self.open:
            self._break_off()
            slow = Refusal(408, "the answer was not read in time")
            self._updates = [Update(update.request, update.time, [], error=slow, ended=True)]

    async def updates(self) -> list[Update]:
        """What has come since the last time, nothing after `IDLE_SECONDS` without; raises `Refusal` for an error."""
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
        """Have `updates` return at once, with nothing if nothing has come: a stream then writes a sign of life."""
        self._arrived.set()

    def finish(self, request: Request) -> None:
        """Ends one of the requests, whose answer is whole, before the next step; harmless when it has ended."""
        self._leave(request, "finished")

    def _break_off(self) -> None:
        self.broken_off |= bool(self.open)
        for request in list(self.open):
            self._leave(request, "cancelled")

    def _leave(self, request: Request, outcome: str) -> None:
        self.open.discard(request)
        self._engine.cancel(request, outcome)


class AsyncEngine:
    """An engine in its thread, for the event loop that is running. most: how many requests may run or wait. room: the
    most tokens of a prompt and its answer that its cache holds, None where nothing bounds it. failure: why the engine
    cannot go on, once that is so."""

    def __init__(
        self, engine: Engine, most: int, metrics: Metrics, connected: Callable[[], int], log: Callable[[str], None]
    ) -> None:
        """connected: Returns how many clients are connected. log: Takes a line about the server."""
        self._loop = asyncio.get_running_loop()
        self.most, self._metrics = most, metrics
        self.room = engine.room
        self._calls: dict[Request, EngineCall] = {}
        self.failure: asyncio.Future[Exception] = self._loop.create_future()
        self._thread = EngineThread(engine, self._deliver, self._fail, lambda text: self._say(log, text))
        self._thread.start()
        self._gathering = Gathering(lambda: connected() - len({*self._calls.values()}), self._thread.add)

    @property
    def hangs(self) -> float | None:
        """Seconds that the step that runs now has taken, if those are more than `HUNG_SECONDS`."""
        seconds = self._thread.seconds
        return seconds if seconds > HUNG_SECONDS else None

    async def report(self) -> tuple[Usage, DraftReport | None]:
        """What the engine holds, and what drafts have come to, after the step that runs. Raises `Refusal`."""
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
            raise Refusal(503, "the engine does not answer") from None

    def call(self, requests: Sequence[Request]) -> EngineCall:
        """Has requests answered. Raises `Refusal` where the queue has no room for all of them."""
        if self.failure.done():
            raise Refusal(503, "the engine has failed, and the server is about to end")
        if len(self._calls) + len(requests) > self.most:
            raise Refusal(503, f"the queue is full: {len(self._calls):,} requests run or wait; try again later")
        call = EngineCall(self, requests)
        rests = not self._calls or self._gathering.holds
        for request in requests:
            self._calls[request] = call
            self._metrics.begin(request)
        (self._gathering if rests else self._thread).add(requests)
        return call

    def cancel(self, request: Request, outcome: str) -> None:
        """Ends a request before the next step; harmless when it has ended. outcome: as `Metrics.end` has it."""
        if self._calls.pop(request, None) is not None:
            self._metrics.end(request, outcome)
            if not self._gathering.drop(request):
                self._thread.cancel(request)

    def close(self, seconds: float) -> bool:
        """Ends the thread after the step that runs; whether that was in so many seconds."""
        return self._thread.close(seconds)

    def _deliver(self, updates: list[Update]) -> None:
        self._loop.call_soon_threadsafe(self._hand_out, updates)

    def _say(self, log: Callable[[str], None], text: str) -> None:
        self._loop.call_soon_threadsafe(log, text)

    def _fail(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._end_all, error)

    def _hand_out(self, updates: list[Update]) -> None:
        for update in updates:
            call = self._calls.get(update.request)
            if call is None:
                continue  # it was cancelled meanwhile
            self._metrics.note(update)
            call.take(update)
            # taking it may have broken off the call of a client that does not read
            if update.ended and self._calls.pop(update.request, None) is not None:
                self._metrics.end(update.request, "failed" if update.error else "finished")

    def _end_all(self, error: Exception) -> None:
        self._hand_out([Update(request, 0.0, [], error=error, ended=True) for request in list(self._calls)])
        self.failure.set_result(error)
