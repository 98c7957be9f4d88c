"""Waiting for an event of another thread or process."""

import time
from collections.abc import Callable, Iterable

# a guard against waiting forever, not an expectation: what takes milliseconds alone may take seconds on a busy machine
GUARD_SECONDS = 60.0


def comes(holds: Callable[[], bool], seconds: float = GUARD_SECONDS) -> bool:
    """Wait until `holds()` is true and return True, or False after the guard time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


def says(words: str, lines: Iterable[str]) -> bool:
    """Read lines of a program until one has these words and return True, or False where it ends before."""
    return any(words in line for line in lines)
