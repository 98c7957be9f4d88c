"""The bytes of a checkpoint's files, read from several threads at once; no torch."""

import os
from pathlib import Path
from threading import Lock
from types import TracebackType

from dsv4cli.engine.checkpoint import TensorInfo
from dsv4cli.errors import CheckpointError


class Files:
    """Files of checkpoints, opened when they are first read; as a context manager, closed at its end."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = Lock()

    def __enter__(self) -> "Files":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every file; what is read afterwards opens its file again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def read(self, info: TensorInfo, begin: int, into: memoryview) -> None:
        """Fills `into`, unsigned bytes, from byte `begin` of a tensor on; other threads run meanwhile.

        Raises CheckpointError for a file that cannot be read or that ends before.
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
            raise CheckpointError(
                f"{info.file} cannot be read at {info.name}: {error.strerror}", "check the file and its disk"
            ) from None

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]
