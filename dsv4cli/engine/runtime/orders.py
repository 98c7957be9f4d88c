"""What the leader's engine tells the other ranks before each step: token ids and decisions."""

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from dsv4cli.engine.runtime.request import ID, Request
from dsv4cli.errors import RankLost

# the name of an order and what it carries, as JSON has them
Order = tuple[str, dict[str, Any]]


class Followers(Protocol):
    """The other ranks of a model, as the leader's engine sees them. Implemented in parallel/followers.py."""

    def send_orders(self, orders: list[Order] | None) -> None:
        """Send them orders. They count as busy until `rest`."""

    def rest(self) -> None:
        """Mark them as idle."""

    def say_farewell(self, farewell: Callable[[RankLost], None]) -> None:
        """Call `farewell`, in another thread, before a lost follower ends this process."""


class Orders:
    """The orders of one engine; without followers they are dropped.

    Attributes:
        waiting: orders that were not sent yet.
        lost: whether another rank has ended.
    """

    def __init__(self, followers: Followers | None) -> None:
        self.waiting: list[Order] = []
        self.lost = False
        self._followers = followers

    def add(self, name: str, **given: Any) -> None:
        """Add an order to the next message."""
        if self._followers is not None:
            self.waiting.append((name, given))

    def send_orders(self) -> None:
        """Send the waiting orders. Raises RankLost."""
        orders, self.waiting = self.waiting, []
        if self._followers is not None:
            self._followers.send_orders(orders)

    def rest(self) -> None:
        """Mark the followers as idle, unless one was lost."""
        if self._followers is not None and not self.lost:
            self._followers.rest()


def described(request: Request) -> dict[str, Any]:
    """Return what the other ranks need to know of a request, for JSON."""
    return {
        "number": request.number,
        "prompt": b64encode(request.pack()).decode(),  # a list of numbers takes JSON ten times as long
        "prefill_chunk": request.prefill_chunk,
        "max_context": request.limits.max_context,
        "end": request.end,
        "keep": request.keep,
        "cache_scope": request.cache_scope,
        "scored": request.scored,
        "sampling": asdict(request.sampling),
    }


def prompt_of(words: str) -> list[int]:
    """Return the prompt from what `described` encoded."""
    return array(ID, b64decode(words)).tolist()
