"""Starts the compiling process early, before the demand is known, because it takes seconds to start. No torch."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread

from dsv4cli.errors import DiskError

PACKAGE = Path(__file__).parents[2]
# `python -m dsv4cli` could import modules from the user's current folder
PROGRAM = f"import sys; sys.path[0] = {str(PACKAGE.parent)!r}; from dsv4cli.__main__ import main; main()"
# exists on Linux if NVIDIA's driver is loaded
DRIVER = Path("/proc/driver/nvidia")


def start() -> "subprocess.Popen[str]":
    """Start the process. It reads the demand from stdin, and ends if stdin is closed before that.

    Raises:
        OSError: the process cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "compile-ahead", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it; it ends with this process
        text=True,
    )


def start_early() -> "subprocess.Popen[str] | None":
    """Start the process if a GPU driver is installed. Return None if not, or if it cannot be started."""
    if not DRIVER.exists():
        return None
    try:
        return start()
    except OSError:
        return None


def start_hashing() -> Thread:
    """Hash Triton's files in a thread, so that forked processes inherit the result.

    It takes up to 2 s and, unlike imports, does not hold the GIL.
    """
    from triton.runtime.cache import triton_key

    hashing = Thread(target=triton_key)
    hashing.start()
    return hashing


def cache_folder() -> Path:
    """Return the folder of Triton's compilation cache."""
    from triton import knobs

    return Path(knobs.cache.dir)


def check_cache_folder() -> None:
    """Raise DiskError if kernels cannot be stored in Triton's cache. Creates the folder if it is missing."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DiskError(
            f"cannot write to Triton's cache {folder}: {error.strerror}", "set TRITON_CACHE_DIR to another folder"
        ) from None
