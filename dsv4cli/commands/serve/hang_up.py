"""What SIGHUP means to a server: the terminal was closed, or the API keys are to be read again."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dsv4cli.errors import UsageError
from dsv4cli.output import counted

if TYPE_CHECKING:
    from dsv4cli.engine.server.accounts import Accounts


class HangUp:
    """Handles SIGHUP. With a key file, it rereads the keys, unless the signal says that the terminal was closed.

    Under nohup, a closed terminal does not end the server.

    Attributes:
        wanted: whether the signal needs a handler.
    """

    def __init__(self, file: Path | None, accounts: "Accounts", say: Callable[[str], None]) -> None:
        """Create the handler.

        Args:
            file: the file of API keys.
            say: called with a line for the log.
        """
        self._file, self._accounts, self._say = file, accounts, say
        self._ends = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        self._terminal = _has_terminal()
        self.wanted = self._ends or file is not None

    def stand_by(self) -> None:
        """Handle the signal until the event loop does, if there is a key file: a model may take minutes to load."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.handle():
                sys.exit(128 + number)

        if self._file is not None:
            signal.signal(signal.SIGHUP, handle)

    def handle(self) -> bool:
        """Reread the keys, if that is what the signal means. Return True if the server is to stop instead."""
        if self._ends and (self._file is None or (self._terminal and not _has_terminal())):
            return True
        self._reread()
        return False

    def _reread(self) -> None:
        """Replace the keys by those of the file. An invalid file changes nothing."""
        from dsv4cli.engine.server.api_keys import read_keys

        if self._file is None:
            return
        try:
            keys = read_keys(self._file)
        except UsageError as error:
            self._say(f"the API keys have not changed: {error.message}; {error.remedy}")
            return
        self._accounts.replace(keys)
        self._say(f"read {counted(len(keys), 'API key')} from {self._file}")


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal, which is lost when the terminal is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
