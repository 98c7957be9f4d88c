"""The thread that owns the engine. It accepts orders from any thread and delivers the results of each step."""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from time import perf_counter

import torch

from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request, RowScores, Token
from dsv4cli.engine.runtime.usage import Usage
from dsv4cli.errors import Dsv4Error, NotEnoughMemory, UnsoundResult, UsageError


@dataclass(frozen=True)
class Update:
    """The results of one step for one request.

    Attributes:
        time: when the step ended (`perf_counter`).
        tokens: the tokens that were sampled.
        scores: rows of scores, for a scoring request.
        error: the error that ended the request.
        ended: whether this is the request's last update.
        began: when the step began.
    """

    request: Request
    time: float
    tokens: list[Token]
    scores: RowScores | None = None
    error: Exception | None = None
    ended: bool = False
    began: float = 0.0


Deliver = Callable[[list[Update]], None]


class EngineThread:
    """Runs an engine in its own thread, with the kernel backend of the thread that creates it.

    While no requests are active, the thread prepares steps in advance, then waits. All callbacks run in that thread.

    Args:
        deliver: called with the updates of each step.
        failed: called with the exception if the engine stops. Nothing is delivered afterwards.
        say: called with each log line.
    """

    def __init__(
        self, engine: Engine, deliver: Deliver, failed: Callable[[Exception], None], say: Callable[[str], None]
    ) -> None:
        self._engine, self._deliver, self._failed, self._say = engine, deliver, failed, say
        self._prepares, self._pinning_is_told = True, False
        self._began: float | None = None  # start of the current step, or of the work between steps (perf_counter)
        self._wake = Condition()
        self._orders: deque[Callable[[], None]] = deque()
        self._closed = False
        self._requests: dict[Request, None] = {}  # in order of arrival
        context = copy_context()
        self._thread = Thread(target=lambda: context.run(self._run), name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, from any thread. No step begins between two of them."""
        self._order(*(partial(self._add, request) for request in requests))

    def cancel(self, request: Request) -> None:
        """End a request before the next step, from any thread. Does nothing if it has already ended."""
        self._order(lambda: self._cancel(request))

    def report(self, take: Callable[[Usage, DraftReport | None], None]) -> None:
        """Call `take` in the engine's thread, after the current step, with the usage and the draft statistics."""
        self._order(lambda: take(self._engine.usage, self._engine.draft_report()))

    def close(self, seconds: float) -> bool:
        """Stop the thread after the current step. Return True if it stopped within `seconds`."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _order(self, *orders: Callable[[], None]) -> None:
        with self._wake:
            self._orders += orders
            self._wake.notify()

    def _run(self) -> None:
        device = self._engine.runner.cache.device
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is per thread
        try:
            while self._carry_out_orders():
                if self._engine.busy:
                    self._attempt(self._step)
                elif not self._orders and not self._prepare():
                    self._wait()
                self._tell_pinning()
        except Exception as error:  # noqa: BLE001 - the thread's owner reports it
            self._failed(error)

    @property
    def seconds(self) -> float:
        """Seconds that the current step has run; 0 if the engine is idle or compiles kernels. Safe from any thread."""
        began = self._began
        return 0.0 if began is None or self.preparing else perf_counter() - began

    @property
    def preparing(self) -> bool:
        """Whether the current step compiles kernels or captures graphs. Safe from any thread."""
        return self._engine.preparing

    def _prepare(self) -> bool:
        """Prepare one item that requests may need, such as a CUDA graph. Return True if any was missing."""
        try:
            return self._prepares and self._engine.prepare()
        except NotEnoughMemory as error:
            if self._engine.followers is not None:
                raise
            self._prepares = False  # from now on, prepare on demand only
            self._say(f"steps are prepared on demand from now on: {error.message}; {error.remedy}")
            return False

    def _tell_pinning(self) -> None:
        refused = self._engine.unpinned
        if refused is not None and not self._pinning_is_told:
            self._pinning_is_told = True
            self._say(f"the prefix cache in host memory is slower: {refused.message}; {refused.remedy}")

    def _wait(self) -> None:
        self._began = None
        with self._wake:
            self._wake.wait_for(lambda: self._orders or self._closed)

    def _carry_out_orders(self) -> bool:
        """Execute the queued orders. Return False if the thread is to stop."""
        self._began = perf_counter()
        with self._wake:
            orders, self._orders = self._orders, deque()
        for order in orders:
            self._attempt(order)
        return not self._closed

    def _attempt(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Dsv4Error as error:
            self._fail_all(error)

    def _add(self, request: Request) -> None:
        self._requests[request] = None
        try:
            self._engine.add(request)
        except UsageError as error:
            del self._requests[request]
            self._deliver([_failure(request, error)])

    def _cancel(self, request: Request) -> None:
        if request in self._requests:
            del self._requests[request]
            self._engine.cancel(request)

    def _step(self) -> None:
        began, results = perf_counter(), self._engine.step()
        now, updates = perf_counter(), []
        for result in results:
            request, tokens = result.request, result.tokens
            ended = request.caught_up if request.scored else bool(tokens and tokens[-1].finish)
            updates.append(Update(request, now, tokens, result.scores, ended=ended, began=began))
            if ended:
                del self._requests[request]
        self._deliver(updates)

    def _fail_all(self, error: Dsv4Error) -> None:
        """End every request with an error. Later requests are served normally.

        With several ranks the error is raised again, unless it is an `UnsoundResult`: the ranks may have stopped at
        different points.
        """
        requests, self._requests = list(self._requests), {}
        self._deliver([_failure(request, error) for request in requests])
        if self._engine.followers is not None and not isinstance(error, UnsoundResult):
            raise error
        for request in requests:
            try:
                self._engine.cancel(request)
            except NotEnoughMemory:  # its state could not be kept: the engine has ended all requests
                if self._engine.followers is not None:
                    raise


def _failure(request: Request, error: Exception) -> Update:
    return Update(request, perf_counter(), [], error=error, ended=True)
