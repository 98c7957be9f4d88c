"""What of a conversion is on the disk for good, so that an interrupted one goes on; no torch.

The folder `.dsv4-convert` inside the output holds the plan in words that can be compared, unfinished files under their
final names, and one journal for each part of a shared job. A line is written after the bytes that it speaks of have
been synced; a line cut off by a crash does not count.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4cli.engine import durable
from dsv4cli.engine.checkpoint import UNFINISHED
from dsv4cli.errors import CheckpointError, UsageError

PLAN = "plan.json"


@dataclass(frozen=True)
class Part:
    """Which part of a shared job this is: the `index`-th of `count`, from 1."""

    index: int = 1
    count: int = 1


class Journal:
    """The journal of one part of one conversion."""

    def __init__(self, output: Path, part: Part) -> None:
        self.folder = output / UNFINISHED
        self.path = self.folder / f"journal-{part.index}-of-{part.count}.jsonl"
        self.batches: dict[str, int] = {}
        self._file = -1

    @contextmanager
    def opened(self, plan: Mapping[str, Any], times: Mapping[str, int]) -> Iterator["Journal"]:
        """Starts a journal or continues the one that is there; a second process on the same part is refused.

        times: when the files of the source were last changed. Raises UsageError where the folder holds another plan, or
        the source has changed since it began.
        """
        with writing(self.folder.parent):
            self.folder.mkdir(parents=True, exist_ok=True)
        begin_plan(self.folder, plan)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(self._file, self.path)
            self._read(dict(times))
            yield self
        finally:
            os.close(self._file)

    def _read(self, times: dict[str, int]) -> None:
        *lines, torn = self.path.read_bytes().split(b"\n")
        if torn:
            os.ftruncate(self._file, self.path.stat().st_size - len(torn))
        entries = [json.loads(line) for line in lines]
        if not entries:
            self._append({"source": times})
        elif entries[0] != {"source": times}:
            raise UsageError(
                f"the source has changed since the conversion into {self.folder.parent} began",
                f"remove {self.folder.parent} and convert again",
            )
        self.batches = {entry["file"]: entry["batches"] for entry in entries[1:]}

    def record(self, file: str, batches: int) -> None:
        """The first `batches` batches of a file are on the disk. Called by one thread at a time."""
        self._append({"file": file, "batches": batches})
        self.batches[file] = batches

    def _append(self, entry: Mapping[str, Any]) -> None:
        durable.append(self._file, (json.dumps(entry) + "\n").encode())


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises UsageError where the system does not let anything be made in a folder."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise UsageError(
            f"{folder} cannot be written to: {error.strerror}", "name a folder where you may write"
        ) from None


def begin_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes the plan of a conversion, or compares it with the one that is there."""
    path = folder / PLAN
    if not path.exists():
        write_file(path, json.dumps(plan).encode(), folder)
    if read_plan(path) != plan:
        raise UsageError(
            f"{folder.parent} holds an unfinished conversion of another source or with other options",
            f"repeat the command that began it, or remove {folder.parent}",
        )


def read_plan(path: Path) -> dict[str, Any]:
    """The plan of a conversion that has begun."""
    try:
        plan: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"{path.parent.parent} holds no unfinished conversion", "name the DST of `dsv4 convert`"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}", f"remove {path.parent.parent} and convert again") from None
    return plan


def write_file(path: Path, content: bytes, workshop: Path) -> None:
    """Writes a file that appears complete or not at all, also after a crash; `workshop` is the journal's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_file(path, content, workshop / f"{path.name}.{os.getpid()}")


def _lock(descriptor: int, path: Path) -> None:
    # not on every platform that Python knows, and only a conversion needs it
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another process is writing this part ({path.name})", "wait for it, or stop it first"
        ) from None
