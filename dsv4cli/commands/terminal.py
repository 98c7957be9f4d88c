"""The terminal while the model is busy: keys wait unseen, and whatever ends the program finds it as it was."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

# what ends the `keys_wait` that runs
_restores: list[Callable[[], None]] = []


@contextmanager
def keys_wait() -> Iterator[None]:
    """The model is loaded, or answers, on a terminal: keys are kept for the next input and not shown between its words.

    Ctrl-Z suspends the program with the terminal as it was.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    restore = terminal_as_it_was()
    _restores.append(restore)

    def suspend(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # the shell lets it go on
        signal.signal(signal.SIGTSTP, suspend)
        _show_no_keys()

    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        _show_no_keys()
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
        _restores.remove(restore)
        restore()


def _show_no_keys() -> None:
    """Ctrl-D waits as a key too: what the terminal keeps of it as an end of file, an editor does not see. In the
    background it is another program's terminal."""
    import termios

    number = sys.stdin.fileno()
    with suppress(OSError):  # the terminal is not the one that decides about jobs
        if os.tcgetpgrp(number) != os.getpgrp():
            return
    *modes, keys = termios.tcgetattr(number)
    modes[3] &= ~termios.ECHO
    keys[termios.VEOF] = bytes([os.fpathconf(number, "PC_VDISABLE")])
    termios.tcsetattr(number, termios.TCSANOW, [*modes, keys])


def terminal_as_it_was() -> Callable[[], None]:
    """What makes the terminal again what it is now, or what it was before `keys_wait`; nothing where there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        return lambda: None
    if _restores:
        return _restores[0]
    import termios

    number = sys.stdin.fileno()
    return partial(termios.tcsetattr, number, termios.TCSANOW, termios.tcgetattr(number))
