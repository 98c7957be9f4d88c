"""How a process ends: together with its parent process, and soon after a signal; no torch."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

# prctl(2): the signal that this process gets when its parent ends
PR_SET_PDEATHSIG = 1
# how long a signal that Python handles may take to end this process
GRACE_SECONDS = 2


def end_with_parent(parent: int) -> None:
    """End this process when its parent ends (Linux). `parent` is the parent's process id.

    If the parent has ended already, exit now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP until the block ends, in the main thread. Ignored signals stay ignored.

    Python's handlers run between any two instructions: one that raises would lose what the block has started.
    """
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    taken = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for each in taken:
        signal.signal(each, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for each, handler in taken.items():
            signal.signal(each, handler)
        for number in held:
            signal.raise_signal(number)


@contextmanager
def ends_soon(leaving: Callable[[int], None]) -> Iterator[None]:
    """Make SIGINT and SIGTERM end the process soon, even while the main thread is blocked in C code.

    Python's handlers do not run while the main thread waits in C for a GPU or another process. The exception of the
    signal gets `GRACE_SECONDS` to leave the block; then `leaving(signum)` is called and the process exits with
    128 + signum. Enter the block in the main thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    left = Event()

    def watch() -> None:
        while number := os.read(reading, 1):
            if number[0] in (signal.SIGINT, signal.SIGTERM) and not left.wait(GRACE_SECONDS):
                leaving(number[0])
                os._exit(128 + number[0])
        os.close(reading)

    before = signal.set_wakeup_fd(writing)
    Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
