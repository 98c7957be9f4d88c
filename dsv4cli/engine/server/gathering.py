"""Gathering of requests that arrive together: one prefill step runs many short prompts in little more time than one."""

import asyncio
from collections.abc import Callable, Sequence

from dsv4cli.engine.runtime.request import Request

# rounds of the event loop until a new connection is accepted and its request read
ROUNDS = 6
# QUIET: seconds without a new request or connection after which the held requests start. LONGEST: the most seconds
# that the first request is held, slightly less than the smallest prefill chunk takes (Flash on one H200: 24 ms), for
# which a request that arrives later would have to wait.
QUIET, LONGEST = 1e-3, 20e-3


class Gathering:
    """Holds requests for an idle engine while other clients have connected and are about to send theirs.

    A request that arrives alone is held for a few rounds of the event loop, less than 0.1 ms. If other connections are
    open and send nothing, it is held for `QUIET` seconds.
    """

    def __init__(self, silent: Callable[[], int], release: Callable[[Sequence[Request]], None]) -> None:
        """Create an empty gathering.

        Args:
            silent: returns the number of connections without a request in progress.
            release: called with the held requests, in the order of their arrival.
        """
        self._loop = asyncio.get_running_loop()
        self._silent, self._release = silent, release
        self._held: list[Request] = []
        self._first = 0.0

    @property
    def holds(self) -> bool:
        """Whether any requests are held."""
        return bool(self._held)

    def add(self, requests: Sequence[Request]) -> None:
        """Hold requests until they are released together."""
        if not self._held:
            self._first = self._loop.time()
            self._loop.call_soon(self._listen, ROUNDS)
        self._held += requests

    def drop(self, request: Request) -> bool:
        """Remove a request. Return True if it was held."""
        held = request in self._held
        if held:
            self._held.remove(request)
        return held

    def _listen(self, rounds: int) -> None:
        if rounds:
            self._loop.call_soon(self._listen, rounds - 1)
        else:
            self._settle(())

    def _settle(self, before: tuple[int, ...]) -> None:
        """Release the requests if no connection is silent, nothing has changed, or `LONGEST` is over; else check again.

        Args:
            before: the counts of silent connections and held requests at the last check.
        """
        silent = self._silent()
        now = silent, len(self._held)
        if silent <= 0 or now == before or self._loop.time() > self._first + LONGEST:
            held, self._held = self._held, []
            self._release(held)
        else:
            self._loop.call_later(QUIET, self._settle, now)
