"""A Unix socket for a server, which exists as long as the server does; no torch."""

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsv4cli.errors import UsageError

# anyone on this machine may connect, as to a loopback address; the folder's permissions can restrict that
MODE = 0o666
OTHER = "use another --uds path, in a folder that you can write to"


@contextmanager
def bound_unix_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a socket that is bound to a path, and remove the path afterwards. No client can connect to it yet.

    A socket that a killed server has left is replaced. A lock file beside it, `PATH.lock`, tells whether its server is
    still loading.

    Raises:
        UsageError: the path cannot be created, or is in use.
    """
    with _locked(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        _remove_old(path)
        try:
            made.bind(os.fspath(path))
            os.chmod(path, MODE)
        except OSError as error:
            raise _unusable(path, str(error.strerror or error)) from None
        try:
            yield made
        finally:
            with suppress(OSError):
                path.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a path. Raises UsageError if another server does."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        with suppress(OSError):
            lock.unlink()
    except BlockingIOError:
        raise _unusable(path, "another server uses it") from None
    finally:
        os.close(number)


def _remove_old(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises UsageError if it is something else."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return
    if not is_socket:
        raise _unusable(path, "it exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(path, str(error.strerror)) from None
        else:
            raise _unusable(path, "another server uses it")


def _unusable(path: Path, reason: str) -> UsageError:
    return UsageError(f"cannot listen on {path}: {reason}", OTHER)
