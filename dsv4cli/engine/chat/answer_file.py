"""Files of answers, to which each answer is written as soon as it ends. Does not import torch."""

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsv4cli.engine.system.atomic import append, write_file
from dsv4cli.errors import DISK_FULL, Dsv4Error, NotEnoughDisk, UsageError

# (index of the prompt, number of the answer to it)
AnswerKey = tuple[int, int]


class CannotWrite(Dsv4Error):
    """A results file cannot be written."""


class LineFile:
    """A JSON-lines file that this process locks until it is closed.

    Attributes:
        lines: the complete lines that the file had when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock the file.

        Raises:
            UsageError: the path is not a regular file, cannot be written, or is locked by another process.
        """
        if path == Path("-"):
            raise UsageError("--out - is not a file: answers go to stdout without --out", "omit --out, or use ./-")
        self.path = path.resolve()  # so that a symlink is kept
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UsageError(f"--out {path} cannot be written: {error.strerror}", "use another file") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise UsageError(f"--out {path} is not a regular file", "omit --out to print the answers to stdout")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise UsageError(f"another process is writing to {path}", "wait for it, or use another file") from None
        except UsageError:
            os.close(self._file)
            raise
        *self.lines, self._rest = self.path.read_bytes().split(b"\n")

    def close(self) -> None:
        """Unlock and close the file."""
        os.close(self._file)

    def remove_rest(self, beginning: bytes) -> bool:
        """Remove an incomplete last line, which is left if a process was killed.

        Args:
            beginning: the text that every line of ours begins with.

        Returns:
            True if the file has complete lines, or if the incomplete line is one of ours. Otherwise nothing is removed.
        """
        ours = bool(self.lines) or self._rest.startswith(beginning) or beginning.startswith(self._rest)
        if ours:
            whole = sum(len(line) + 1 for line in self.lines)
            os.ftruncate(self._file, whole)
        return ours

    def add(self, record: dict[str, Any], kept: int) -> None:
        """Append a line. It is on disk when the call returns.

        Args:
            kept: number of answers in the file, for errors.

        Raises:
            CannotWrite: the file cannot be written.
            NotEnoughDisk: the disk or quota is full.
        """
        with self._writing(kept):
            append(self._file, _line(record))

    def rewrite(self, records: Sequence[dict[str, Any]]) -> None:
        """Replace the lines of the file atomically.

        Raises:
            CannotWrite: the file cannot be written.
            NotEnoughDisk: the disk or quota is full.
        """
        lines = b"".join(map(_line, records))
        if lines != self.path.read_bytes():
            # does not contain the file's name, which may already have the maximum length
            temporary = self.path.with_name(f".dsv4-{os.getpid()}")
            try:
                with self._writing(len(records)):
                    write_file(self.path, lines, temporary, stat.S_IMODE(os.fstat(self._file).st_mode))
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _writing(self, kept: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self.path} cannot be written: {error.strerror}; it contains the first {kept:,} answers"
            if error.errno in DISK_FULL:
                raise NotEnoughDisk(message, "free some space, then run the same command to continue") from None
            raise CannotWrite(message, "run the same command to continue") from None


def key_of(record: Mapping[str, Any]) -> AnswerKey:
    """Return the key of an answer."""
    return record["index"], record.get("sample", 0)


class AnswerFile:
    """The file of `dsv4 run --out`, with one answer per line, which this process locks until it is closed.

    The `request` of a line identifies its prompt and settings, so that a later run can tell whether to reuse the
    answer.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock the file, and read its answers.

        Raises:
            UsageError: it is not a file of answers, cannot be written, or is locked by another process.
        """
        self._file = LineFile(path)
        self.path = self._file.path
        try:
            self.records = self._read()
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Unlock and close the file."""
        self._file.close()

    def _read(self) -> dict[AnswerKey, dict[str, Any]]:
        """Return the answers in the file, and remove an incomplete last line."""
        found: dict[AnswerKey, dict[str, Any]] = {}
        for number, line in enumerate(self._file.lines, 1):
            try:
                record = json.loads(line)
                numbers, request = (*key_of(record), record["seed"]), record["request"]
                if not isinstance(request, str) or any(type(one) is not int for one in numbers):
                    raise ValueError(request)
                found.setdefault(key_of(record), record)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise UsageError(
                    f"{self.path}, line {number}: not an answer written by --out", "use another file"
                ) from None
        if not self._file.remove_rest(b'{"index": '):
            raise UsageError(f"{self.path} is not a file of answers", "use another file")
        return found

    def add(self, record: dict[str, Any]) -> None:
        """Append an answer. It is on disk when the call returns. Raises what `LineFile.add` raises."""
        self._file.add(record, len(self.records))
        self.records[key_of(record)] = record

    def order(self) -> None:
        """Sort the answers in the file in the order of the prompts, atomically."""
        self._file.rewrite([self.records[key] for key in sorted(self.records)])


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="surrogatepass")
