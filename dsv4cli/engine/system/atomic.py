"""Files that survive a crash: what a call has written is on the disk for good once it has returned; no torch."""

import errno
import os
from pathlib import Path


def append(descriptor: int, content: bytes) -> None:
    """Writes all of it behind what is there, and syncs. Raises OSError."""
    write(descriptor, content)
    os.fsync(descriptor)


def write(descriptor: int, content: bytes) -> None:
    """Writes all of it at the descriptor's place. Raises OSError."""
    left = memoryview(content)
    while left:
        # a disk that fills up takes a part
        left = left[os.write(descriptor, left) :]


def write_file(path: Path, content: bytes, temporary: Path, mode: int = 0o666) -> None:
    """Writes a file that appears complete or not at all, also after a crash, with these rights, less the umask's.

    temporary: on the same file system; after an error it may still be there. Raises OSError, also for a device or a
    pipe, in whose place the file would come.
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
    """Gives a synced file its final name, and syncs the name."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
