"""Ctrl-C in `dsv4 chat`: once to stop a turn, twice to quit."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import FrameType

# seconds in which a second Ctrl-C quits
TWICE = 2.0


@dataclass
class Interrupts:
    """What Ctrl-C has requested, and whether it may interrupt at once.

    Attributes:
        stopped: Ctrl-C stopped the last turn.
        leaving: The next error quits: after the second Ctrl-C, and while no model is loaded.
        breakable: Ctrl-C raises KeyboardInterrupt at once, because prefill or tool calls are running.
    """

    stopped: bool = False
    leaving: bool = False
    breakable: bool = False
    _last: float = float("-inf")

    def again(self) -> bool:
        """Record a Ctrl-C. Return whether it is the second one within `TWICE` seconds."""
        before, self._last = self._last, monotonic()
        return self._last - before < TWICE

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Handle Ctrl-C during a turn: `stop` it before its next step, or at once if it is `breakable`. Twice quits."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.again():  # may run inside the handler of the first: never reset to False
                self.leaving = True
            self.stopped = True
            stop()
            if self.breakable:
                self.breakable = False  # only once: the cleanup must not be interrupted
                raise KeyboardInterrupt

        self.stopped = self.leaving = False
        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
