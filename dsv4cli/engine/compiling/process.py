"""The process that compiles: it may be started before it is known what, for it takes seconds to begin; no torch."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

PACKAGE = Path(__file__).parents[2]
# `python -m dsv4cli` would take what the folder has where the user is
PROGRAM = f"import sys; sys.path[0] = {str(PACKAGE.parent)!r}; from dsv4cli.__main__ import main; main()"
# where there is a driver of NVIDIA's, on Linux
DRIVER = Path("/proc/driver/nvidia")


def start() -> "subprocess.Popen[str]":
    """The process, which waits for what to compile on its stdin and ends where that is closed before. Raises OSError
    where none can be started."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "compile-ahead", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it sees no Ctrl-C: it ends with this process
        text=True,
    )


def start_early() -> "subprocess.Popen[str] | None":
    """The process, where a GPU's driver is; None where not, or where none can be started."""
    if not DRIVER.exists():
        return None
    try:
        return start()
    except OSError:
        return None


def start_hashing() -> Thread:
    """Hashes Triton's files, up to 2 s, so that forks have it: it needs no lock of the interpreter, as imports do."""
    from triton.runtime.cache import triton_key

    hashing = Thread(target=triton_key)
    hashing.start()
    return hashing


def cache_folder() -> Path:
    """Where Triton keeps what it has compiled."""
    from triton import knobs

    return Path(knobs.cache.dir)
