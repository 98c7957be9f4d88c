"""What can go wrong for a user, each with its exit code; standard library only.

Every error says what failed and where; `remedy` is the next thing to do, one sentence or a command.
"""

from collections.abc import Sequence
from typing import ClassVar


class Dsv4Error(Exception):
    """A failure that is the input's or the machine's, not a bug: shown as two lines, without a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str = "", details: Sequence[str] = ()) -> None:
        """details: a line each, between the message and the remedy."""
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details


class UsageError(Dsv4Error):
    """An option, a prompt or an input file is not what the command takes."""

    exit_code = 2


class ModelNotFound(Dsv4Error):
    """The named model is not on this machine."""


class CheckpointError(Dsv4Error):
    """A DeepSeek-V4 checkpoint that is damaged, incomplete or contradicts itself."""


class UnsupportedCheckpoint(Dsv4Error):
    """A model or a layout that this engine does not run, refused by name."""

    exit_code = 4


class UnsupportedHardware(Dsv4Error):
    """A device that is not there."""

    exit_code = 4


class NotEnoughMemory(Dsv4Error):
    """The weights or the cache do not fit on the device."""

    exit_code = 5


class NotEnoughDisk(Dsv4Error):
    """A file system has no room for what a command writes."""

    exit_code = 5


class DiskError(Dsv4Error):
    """A disk fails at writing or at giving back what was written."""


class HubError(Dsv4Error):
    """The hub cannot be reached, refuses, or does not hold what was asked for."""

    exit_code = 6


class RankLost(Dsv4Error):
    """A rank of a run in several has ended, and the others cannot go on."""


class UnsoundResult(Dsv4Error):
    """The computation finished but its numbers are not finite."""

    exit_code = 7
