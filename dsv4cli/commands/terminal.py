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
# DEC private mode 2004: the terminal sends ESC [200~ before a paste and ESC [201~ behind it
_MARK_PASTES, _LEAVE_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"
# descriptors of terminals that are to mark pastes
_marking: list[int] = []
# seconds: a terminal that has sent nothing for so long has sent all that was typed or pasted
SILENT = 0.05


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
        leave_pastes()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # the shell lets it go on
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
    """Ctrl-D waits as a key too: what the terminal keeps of it as an end of file, an editor does not see. In the
    background it is another program's terminal."""
    import termios

    number = sys.stdin.fileno()
    if not in_foreground():
        return
    *modes, keys = termios.tcgetattr(number)
    modes[3] &= ~termios.ECHO
    keys[termios.VEOF] = bytes([os.fpathconf(number, "PC_VDISABLE")])
    termios.tcsetattr(number, termios.TCSANOW, [*modes, keys])


def in_foreground() -> bool:
    """Whether the keys are for this program, as far as the terminal of stdin decides about jobs."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return True


@contextmanager
def pastes_marked() -> Iterator[None]:
    """Have the terminal mark the ends of a paste, whenever it comes, for an editor to take its lines as one message."""
    number = sys.stdout.fileno()
    _marking.append(number)
    try:
        mark_pastes()
        yield
    finally:
        leave_pastes()
        _marking.remove(number)


def mark_pastes() -> None:
    """Turn the marks on again, where `pastes_marked` runs, after another program or an editor has turned them off."""
    _tell_terminals(_MARK_PASTES)


def leave_pastes() -> None:
    """Turn the marks off for whoever has the terminal next."""
    _tell_terminals(_LEAVE_PASTES)


def _tell_terminals(code: bytes) -> None:
    for number in _marking:
        with suppress(OSError):  # the terminal is gone
            os.write(number, code)


def drop_typed_ahead() -> None:
    """Forget the keys that wait for the next input, those too for which the terminal's buffer had no room yet."""
    import termios
    from select import select

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    *modes, keys = termios.tcgetattr(number)
    modes[3] &= ~(termios.ECHO | termios.ICANON)  # half a line is there to be read, too
    termios.tcsetattr(number, termios.TCSANOW, [*modes, keys])
    try:
        termios.tcflush(number, termios.TCIFLUSH)
        while select([number], [], [], SILENT)[0]:
            termios.tcflush(number, termios.TCIFLUSH)
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


def terminal_as_it_was() -> Callable[[], None]:
    """What makes the terminal again what it is now, or what it was before `keys_wait`; nothing where there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        return lambda: None
    if _restores:
        return _restores[0]
    import termios

    number = sys.stdin.fileno()
    return partial(termios.tcsetattr, number, termios.TCSANOW, termios.tcgetattr(number))
