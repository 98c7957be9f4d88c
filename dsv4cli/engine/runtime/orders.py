"""What the leader's engine has the other ranks do: token ids and decisions, told before each step."""

from array import array
from base64 import b64decode, b64encode
from dataclasses import asdict
from typing import Any, Protocol

from dsv4cli.engine.runtime.request import ID, Request

# the name of an order and what it carries, as JSON has them
Order = tuple[str, dict[str, Any]]


class Followers(Protocol):
    """The other ranks of a model, as the leader's engine sees them: parallel/followers.py."""

    def tell(self, orders: list[Order] | None) -> None:
        """Sends them orders, which keep them busy until `rest`."""

    def rest(self) -> None:
        """They wait for more."""


class Orders:
    """The orders of one engine; where nobody follows there are none.

    waiting: those that were not told yet. lost: whether another rank is gone: whoever watches them sees which one, and
    how, as long as they count as busy.
    """

    def __init__(self, followers: Followers | None) -> None:
        self.waiting: list[Order] = []
        self.lost = False
        self._followers = followers

    def add(self, name: str, **given: Any) -> None:
        """An order, which is told with those before it and after it."""
        if self._followers is not None:
            self.waiting.append((name, given))

    def tell(self) -> None:
        """Has the others carry out what waits. Raises RankLost."""
        orders, self.waiting = self.waiting, []
        if self._followers is not None:
            self._followers.tell(orders)

    def rest(self) -> None:
        """Nothing more comes for now."""
        if self._followers is not None and not self.lost:
            self._followers.rest()


def described(request: Request) -> dict[str, Any]:
    """What the other ranks are told of a request."""
    return {
        "number": request.number,
        "prompt": b64encode(request.pack()).decode(),  # a list of numbers takes JSON ten times as long
        "prefill_chunk": request.prefill_chunk,
        "max_context": request.limits.max_context,
        "end": request.end,
        "keep": request.keep,
        "scored": request.scored,
        "sampling": asdict(request.sampling),
    }


def prompt_of(words: str) -> list[int]:
    """The prompt of a request, as `described` has it."""
    return array(ID, b64decode(words)).tolist()
