"""Errors that a user can cause or fix, each with its exit code. Standard library only.

The message says what failed and where. `remedy` says what to do next, as a sentence or a command.
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
    """A failure caused by the input or the machine, not by a bug. It is shown as two lines without a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str = "", details: Sequence[str] = ()) -> None:
        """details: Lines to print between the message and the remedy."""
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details


class UsageError(Dsv4Error):
    """An invalid option, prompt or input file."""

    exit_code = 2


class ModelNotFound(Dsv4Error):
    """The named model is not on this machine."""


class CheckpointError(Dsv4Error):
    """A DeepSeek-V4 checkpoint that is damaged, incomplete or inconsistent."""


class UnknownKey(CheckpointError):
    """A configuration key or value that this engine does not know; other programs may know or ignore it."""


class UnsupportedCheckpoint(Dsv4Error):
    """A recognized model or layout that this engine cannot run."""

    exit_code = 4


class UnsupportedHardware(Dsv4Error):
    """A device that is missing or that the kernels do not support."""

    exit_code = 4


class NotEnoughMemory(Dsv4Error):
    """The weights or the cache do not fit on the device."""

    exit_code = 5


class NotEnoughDisk(Dsv4Error):
    """A file system without enough free space for the output."""

    exit_code = 5


class DiskError(Dsv4Error):
    """A disk that fails to write, or to read back what was written."""


class HubError(Dsv4Error):
    """The Hugging Face Hub cannot be reached, rejects the request, or does not have the requested file."""

    exit_code = 6


class ServerError(Dsv4Error):
    """A server that cannot be reached, rejects the request, or answers in an unknown format."""

    exit_code = 6


class AnswerLost(ServerError):
    """A server's answer that broke off. The text received so far is kept."""


class RankLost(Dsv4Error):
    """A tensor-parallel rank has exited, so the others cannot continue."""


class UnsoundResult(Dsv4Error):
    """The computation finished but its numbers are not finite."""

    exit_code = 7


def missing_package(error: ModuleNotFoundError) -> Dsv4Error | None:
    """Return the error for a package that is not installed; None for a module of dsv4 itself, which is a bug."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "dsv4cli") or package in sys.stdlib_module_names:
        return None
    return Dsv4Error(
        f"dsv4 needs the package {package}, which is not installed for {sys.executable}",
        "in a clone of dsv4, `make run` installs all packages into .venv; then use .venv/bin/dsv4",
    )


def extra_remedy(extra: str) -> str:
    """Return the remedy for a missing package of an optional extra."""
    return f"in a clone of dsv4, install it: pip install '.[{extra}]'"


def compiler_refusal(error: Exception) -> UnsupportedHardware | None:
    """Convert an error of Triton's compiler or launcher for this GPU to UnsupportedHardware; None for other errors."""
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
    # for an error in the kernel's source, Triton prints the source first
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
