"""Copies files of the source unchanged, in pieces, so that large files need no memory. No torch."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsv4cli.engine.checkpoint.remedies import download_again
from dsv4cli.engine.conversion.journal import temporary_name
from dsv4cli.engine.conversion.metadata import copied_files, is_dead
from dsv4cli.engine.system import atomic
from dsv4cli.engine.system.regular_files import open_file
from dsv4cli.errors import CheckpointError

CHUNK = 1 << 22


@dataclass(frozen=True)
class Copy:
    """A file of the source, its destination and its size."""

    source: Path
    target: Path
    nbytes: int

    @property
    def is_done(self) -> bool:
        """Whether a file of this size has its name: a copy is renamed when it is complete."""
        return self.target.is_file() and self.target.stat().st_size == self.nbytes

    def carry_out(self, workshop: Path, report: Callable[[int], None]) -> None:
        """Write the copy atomically. `report` is called with the bytes of each piece.

        Raises CheckpointError for a source that cannot be read, OSError for a target that cannot be written.
        """
        self.target.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(self.target, workshop)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with _SourceReader(self.source) as reader:
                while piece := reader.read():
                    atomic.write(descriptor, piece)
                    report(len(piece))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        atomic.publish(temporary, self.target)


def copies_of(folder: Path, output: Path) -> tuple[Copy, ...]:
    """Return the files to copy unchanged. Raises CheckpointError for a dangling link, which would be left out."""
    files = copied_files(folder)
    lost = next(filter(is_dead, files), None)
    if lost is not None:
        remedy = download_again(folder, lost.relative_to(folder).as_posix())
        raise CheckpointError(f"{lost} is missing, but a link points to it", f"{remedy}, or remove the link")
    return tuple(Copy(path, output / path.relative_to(folder), path.stat().st_size) for path in files)


class _SourceReader:
    """Reads a file in pieces, and reports read errors as errors of the source, not of the output."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "_SourceReader":
        try:
            self._descriptor = open_file(self.path)
        except OSError as error:
            raise self._refused(error) from None
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def read(self) -> bytes:
        """Return the next bytes; none at the end. Raises CheckpointError."""
        try:
            return os.read(self._descriptor, CHUNK)
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {error.strerror}", "check the file and its permissions")
