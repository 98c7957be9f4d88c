"""Crash-safe file writes: the content is on the disk when a call returns; no torch."""

import errno
import os
from pathlib import Path


def append(descriptor: int, content: bytes) -> None:
    """Append all of `content` to the file and sync it. Raises OSError."""
    write(descriptor, content)
    os.fsync(descriptor)


def write(descriptor: int, content: bytes) -> None:
    """Write all of `content` at the descriptor's current offset. Raises OSError."""
    left = memoryview(content)
    while left:
        # a disk that fills up takes a part
        left = left[os.write(descriptor, left) :]


def write_file(path: Path, content: bytes, temporary: Path, mode: int = 0o666) -> None:
    """Write a file atomically: after a crash it is either complete or absent.

    Args:
        path: final path; a device or a pipe is refused, because the file would replace it.
        content: the bytes to write.
        temporary: a path on the same file system; it may remain after an error.
        mode: permission bits; the umask is applied.

    Raises OSError.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is there, and is not a file", str(path))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        append(descriptor, content)
    finally:
        os.close(descriptor)
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a synced file to its final name and sync the directory."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a directory, so that the names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
