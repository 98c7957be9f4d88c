"""Opening checkpoint files: regular files only, so that no read blocks forever; no torch."""

import errno
import os
import stat
from pathlib import Path

from dsv4cli.errors import CheckpointError

# kinds of files that are not regular files, by mode
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# size, time of the last change in nanoseconds, and which file it is
Stamp = tuple[int, int, int]


def is_there(path: Path) -> bool:
    """Return whether a path names something to read: a file, or something that `open_file` refuses.

    False for a folder and a dangling link.
    """
    # os.path answers False where Path raises: a name too long, a folder that may not be searched
    return os.path.exists(path) and not os.path.isdir(path)


def open_file(path: Path) -> int:
    """Return a descriptor for reading. Raises CheckpointError for a pipe, device or socket, else OSError."""
    _check(path, os.stat(path))
    # non-blocking, in case a pipe has replaced the file since the check
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor))
    except CheckpointError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raises as `open_file`."""
    with open(open_file(path), "rb") as file:
        return file.read()


def stamp(status: os.stat_result) -> Stamp:
    """Return a value that changes when a file is written to or replaced."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def _check(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}, not a file", "replace it with the real file")
