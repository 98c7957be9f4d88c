"""Files of answers: each answer is in it as soon as it ends, whatever happens then; no torch."""

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

# an answer's key: the index of its prompt, and which of the answers to it
AnswerKey = tuple[int, int]


class CannotWrite(Dsv4Error):
    """A file of results cannot be written."""


class LineFile:
    """A file of JSON lines, held by this process until it is closed. lines: those that were there, whole ones only."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a path that is not a file, or that another process holds."""
        self.path = path.resolve()  # a link stays a link
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UsageError(f"--out {path} cannot be written: {error.strerror}", "name another file") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise UsageError(f"--out {path} is not a file", "leave out --out, and answers go to stdout")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise UsageError(f"another process writes to {path}", "wait for it, or name another file") from None
        except UsageError:
            os.close(self._file)
            raise
        *self.lines, self._rest = self.path.read_bytes().split(b"\n")

    def close(self) -> None:
        """Lets others have the file."""
        os.close(self._file)

    def remove_rest(self, beginning: bytes) -> bool:
        """Removes a last line that a kill has cut off; whether it was one of ours, which begin so."""
        ours = bool(self.lines) or self._rest.startswith(beginning) or beginning.startswith(self._rest)
        if ours:
            whole = sum(len(line) + 1 for line in self.lines)
            os.ftruncate(self._file, whole)
        return ours

    def add(self, record: dict[str, Any], kept: int) -> None:
        """Adds a line; once this returns, it is on the disk. kept: how many answers are there. Raises CannotWrite or
        NotEnoughDisk."""
        with self._writing(kept):
            append(self._file, _line(record))

    def rewrite(self, records: Sequence[dict[str, Any]]) -> None:
        """Gives the file these lines: it has the old ones or the new ones, whatever happens. Raises CannotWrite or
        NotEnoughDisk."""
        lines = b"".join(map(_line, records))
        if lines != self.path.read_bytes():
            # without the file's name, which may be as long as names can be
            beside = self.path.with_name(f".dsv4-{os.getpid()}")
            try:
                with self._writing(len(records)):
                    write_file(self.path, lines, beside, stat.S_IMODE(os.fstat(self._file).st_mode))
            finally:
                beside.unlink(missing_ok=True)

    @contextmanager
    def _writing(self, kept: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self.path} cannot be written: {error.strerror}; it has the {kept:,} answers before"
            if error.errno in DISK_FULL:
                raise NotEnoughDisk(message, "free some space, then run the same command: it continues") from None
            raise CannotWrite(message, "run the same command: it continues") from None


def key_of(record: Mapping[str, Any]) -> AnswerKey:
    """Where an answer belongs."""
    return record["index"], record.get("sample", 0)


class AnswerFile:
    """The file of `run --out`, one line an answer, held by this process until it is closed.

    request: of a line, what tells that it answers the same prompt in the same way.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a path that is not a file of answers, or that another process holds."""
        self._file = LineFile(path)
        self.path = self._file.path
        try:
            self.records = self._read()
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Lets others have the file."""
        self._file.close()

    def _read(self) -> dict[AnswerKey, dict[str, Any]]:
        """The answers that are there; a last line that a kill has cut off is removed."""
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
                    f"{self.path}, line {number}: not an answer that --out has written", "name another file"
                ) from None
        if not self._file.remove_rest(b'{"index": '):
            raise UsageError(f"{self.path} is not a file of answers", "name another file")
        return found

    def add(self, record: dict[str, Any]) -> None:
        """Takes an answer; once this returns, it is on the disk. Raises what `LineFile.add` raises."""
        self._file.add(record, len(self.records))
        self.records[key_of(record)] = record

    def order(self) -> None:
        """Gives the file the order of the prompts: it has the old one or the new one, whatever happens."""
        self._file.rewrite([self.records[key] for key in sorted(self.records)])


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="surrogatepass")
