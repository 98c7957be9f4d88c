"""Thread-safe reads of a checkpoint's files; no torch."""

import errno
import os
from pathlib import Path
from threading import Lock
from types import TracebackType

from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.system.regular_files import Stamp, open_file, stamp
from dsv4cli.errors import CheckpointError


class Files:
    """Checkpoint files that are opened at their first read; as a context manager, checked and closed on exit."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._stamps: dict[Path, Stamp] = {}
        self._lock = Lock()

    def __enter__(self) -> "Files":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files. Raises CheckpointError for a file that was modified since its first read."""
        try:
            if kind is None:
                self._check_unchanged()
        finally:
            self.close()

    def close(self) -> None:
        """Close every file; a later read opens its file again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
            self._stamps.clear()

    def read(self, info: TensorInfo, begin: int, into: memoryview) -> None:
        """Fill `into` (unsigned bytes) with the bytes of a tensor from offset `begin`; other threads keep running.

        Raises CheckpointError for a file that cannot be read or is too short.
        """
        done = 0
        try:
            descriptor = self._descriptor(info.file)
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], info.begin + begin + done)
                if not count:
                    raise CheckpointError(f"{info.file} ends inside {info.name}", f"download {info.file.name} again")
                done += count
        except OSError as error:
            # a model may have more files than a process may open
            many = error.errno == errno.EMFILE
            remedy = "raise the limit, as with `ulimit -n 4096`" if many else "check the file and its disk"
            raise CheckpointError(f"{info.file} cannot be read at {info.name}: {error.strerror}", remedy) from None

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                descriptor = open_file(path)
                self._descriptors[path] = descriptor
                self._stamps[path] = stamp(os.fstat(descriptor))
            return self._descriptors[path]

    def _check_unchanged(self) -> None:
        with self._lock:
            for path, before in self._stamps.items():
                check_unchanged(path, before)


def check_unchanged(path: Path, before: Stamp) -> None:
    """Raise CheckpointError if the file was replaced or modified since it was read."""
    try:
        now = stamp(os.stat(path))
    except FileNotFoundError:
        # an open descriptor still reads the content of a removed file
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the file and its disk") from None
    if now != before:
        raise CheckpointError(
            f"{path} changed while it was read, so the data is a mix of old and new",
            "wait until nothing writes to it, then run the command again",
        )
