"""Requests that come together begin together: one chunk reads many short prompts in little more than one's time."""

import asyncio
from collections.abc import Callable, Sequence

from dsv4cli.engine.runtime.request import Request

# rounds of the event loop in which a client that has connected is accepted and heard
ROUNDS = 6
# seconds without news after which nobody else is waited for, and how long the first request waits at most: not quite as
# long as the smallest chunk takes, which another would have to wait for (Flash on one H200: 24 ms)
QUIET, LONGEST = 1e-3, 20e-3


class Gathering:
    """Holds requests for an engine that rests, while other clients have connected and are about to ask.

    Alone a request is held for a few rounds of the event loop, less than 0.1 ms; beside connections that ask nothing
    for QUIET seconds.
    """

    def __init__(self, silent: Callable[[], int], release: Callable[[Sequence[Request]], None]) -> None:
        """silent: how many connections have no request under way. release: takes the requests, in their order."""
        self._loop = asyncio.get_running_loop()
        self._silent, self._release = silent, release
        self._held: list[Request] = []
        self._first = 0.0

    @property
    def holds(self) -> bool:
        """Whether there are some."""
        return bool(self._held)

    def add(self, requests: Sequence[Request]) -> None:
        """Holds some more."""
        if not self._held:
            self._first = self._loop.time()
            self._loop.call_soon(self._listen, ROUNDS)
        self._held += requests

    def drop(self, request: Request) -> bool:
        """Forgets one; whether it was held."""
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
        """before: how many were silent and held when it was last asked."""
        silent = self._silent()
        now = silent, len(self._held)
        if silent <= 0 or now == before or self._loop.time() > self._first + LONGEST:
            held, self._held = self._held, []
            self._release(held)
        else:
            self._loop.call_later(QUIET, self._settle, now)
