"""What can go wrong for a user, each with its exit code; standard library only.

Every error says what failed and where; `remedy` is the next thing to do, one sentence or a command.
"""

import errno
import re
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import ClassVar

# system errors that mean that no more bytes can be stored: the disk or the user's quota is full
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Triton's modules that compile a kernel, or the code that launches it; the driver's errors are raised there too, of
# which those about the image of a kernel are the card's, and others may be ours
COMPILING = re.compile(r"triton\.(compiler\.|backends\.\w+\.compiler$|runtime\.build$)")
DRIVERS = re.compile(r"Triton Error \[\w+\](?!.*(image|PTX))")


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


class UnknownKey(CheckpointError):
    """A configuration says what this engine does not know, and other programs may know or pass over."""


class UnsupportedCheckpoint(Dsv4Error):
    """A model or a layout that this engine does not run, refused by name."""

    exit_code = 4


class UnsupportedHardware(Dsv4Error):
    """A device that is not there, or that the kernels do not run on."""

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


class ServerError(Dsv4Error):
    """A server cannot be reached, refuses, or answers in another format."""

    exit_code = 6


class AnswerLost(ServerError):
    """A server's answer has ended before its end; what came of it is kept."""


class RankLost(Dsv4Error):
    """A rank of a run in several has ended, and the others cannot go on."""


class UnsoundResult(Dsv4Error):
    """The computation finished but its numbers are not finite."""

    exit_code = 7


def compiler_refusal(error: Exception) -> UnsupportedHardware | None:
    """What Triton's compiler or launcher says against a kernel on this card; None for every other error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    launch = next((frame for frame, name in zip(frames, names, strict=True) if _launches(frame, name)), None)
    own = any(base.__module__ == "triton.errors" for base in type(error).__mro__)
    compiling = any(COMPILING.match(name) for name in names) and not DRIVERS.match(str(error))
    if launch is None or not (own or (compiling and not isinstance(error, OSError))):
        return None
    kernel = launch.f_locals["self"]
    name = f"{kernel.__module__}.{kernel.__name__}".removeprefix("dsv4cli.kernels.").replace(".kernel.", ".")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # of an error in the source Triton shows the source first
    reason = lines[-1] if hasattr(error, "node") else lines[0]
    return UnsupportedHardware(
        f"the Triton kernel {name} does not run on {_card()}: {reason[:200]}",
        "use --backend torch, which is slower; DSV4_DEBUG=1 shows the compiler's whole message",
    )


def _launches(frame: FrameType, module: str) -> bool:
    return module == "triton.runtime.jit" and frame.f_code.co_name == "run"


def _card() -> str:
    cuda = sys.modules["torch"].cuda
    if not cuda.is_available():
        return "this machine"
    properties = cuda.get_device_properties(cuda.current_device())
    return f"{properties.name} (compute capability {properties.major}.{properties.minor})"
