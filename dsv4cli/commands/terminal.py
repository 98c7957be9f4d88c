"""Terminal state while the model is busy: keys are buffered without echo, and every exit restores the terminal."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

# functions that restore the terminal, one for each active `keys_wait`
_restores: list[Callable[[], None]] = []
# DEC private mode 2004, bracketed paste: the terminal sends ESC [200~ before a paste and ESC [201~ after it
_MARK_PASTES, _LEAVE_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"
# file descriptors of terminals with bracketed paste
_marking: list[int] = []
# seconds without input after which everything typed or pasted is taken to have arrived
SILENT = 0.05


@contextmanager
def keys_wait() -> Iterator[None]:
    """Buffer typed keys for the next input, without echo, while the model loads or answers.

    Ctrl-Z suspends the program and restores the terminal.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    restore = terminal_as_it_was()
    _restores.append(restore)

    def suspend(number: int, frame: FrameType | None) -> None:
        restore()
        leave_pastes()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # the shell has resumed the process
        signal.signal(signal.SIGTSTP, suspend)
        _show_no_keys()
        mark_pastes()

    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        _show_no_keys()
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
        _restores.remove(restore)
        restore()


def _show_no_keys() -> None:
    """Turn off echo, and make Ctrl-D an ordinary key: an editor would not see an end of file that the terminal stores.

    Does nothing in the background, where another program has the terminal.
    """
    import termios

    number = sys.stdin.fileno()
    if not in_foreground():
        return
    *modes, keys = termios.tcgetattr(number)
    modes[3] &= ~termios.ECHO
    keys[termios.VEOF] = bytes([os.fpathconf(number, "PC_VDISABLE")])
    termios.tcsetattr(number, termios.TCSANOW, [*modes, keys])


def in_foreground() -> bool:
    """Return whether this process group has the terminal of stdin."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return True


@contextmanager
def pastes_marked() -> Iterator[None]:
    """Enable bracketed paste during the block, so that an editor can take pasted lines as one message."""
    number = sys.stdout.fileno()
    _marking.append(number)
    try:
        mark_pastes()
        yield
    finally:
        leave_pastes()
        _marking.remove(number)


def mark_pastes() -> None:
    """Enable bracketed paste again, inside `pastes_marked`, after an editor or another program has disabled it."""
    _write_to_terminals(_MARK_PASTES)


def leave_pastes() -> None:
    """Disable bracketed paste for the terminal's next user."""
    _write_to_terminals(_LEAVE_PASTES)


def _write_to_terminals(code: bytes) -> None:
    for number in _marking:
        with suppress(OSError):  # the terminal is gone
            os.write(number, code)


def drop_typed_ahead() -> None:
    """Discard keys typed ahead for the next input, including those that do not fit in the terminal's buffer yet."""
    import termios
    from select import select

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    *modes, keys = termios.tcgetattr(number)
    modes[3] &= ~(termios.ECHO | termios.ICANON)  # so that an incomplete line can be read, too
    termios.tcsetattr(number, termios.TCSANOW, [*modes, keys])
    try:
        termios.tcflush(number, termios.TCIFLUSH)
        while select([number], [], [], SILENT)[0]:
            termios.tcflush(number, termios.TCIFLUSH)
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


def terminal_as_it_was() -> Callable[[], None]:
    """Return a function that restores the terminal's current mode, or its mode before `keys_wait`."""
    if sys.stdin is None or not sys.stdin.isatty():
        return lambda: None
    if _restores:
        return _restores[0]
    import termios

    number = sys.stdin.fileno()
    return partial(termios.tcsetattr, number, termios.TCSANOW, termios.tcgetattr(number))
