"""SHA256SUMS: a hash of every file of a finished output, in the format of sha256sum. No torch.

The first line, a comment for sha256sum, identifies the conversion. Programs that load models ignore the file.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from dsv4cli.engine.system.regular_files import open_file, read_bytes
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import CheckpointError, UnsoundResult
from dsv4cli.harmless import shell_word

MANIFEST = "SHA256SUMS"
MARK = "# dsv4 convert "
CHUNK = 1 << 22
# how much of an output has been compared with its source, from least to most
CHECKS = ("off", "sample", "full")


class Stopped(Exception):
    """Hashing was canceled."""


@dataclass(frozen=True)
class Origin:
    """The conversion that made an output.

    Attributes:
        jobs: hashes of plan and source, one per machine.
        layer: the source's layer that is the output's first.
        compared: how much was compared with the source: full, sample or off.
    """

    to: str
    jobs: tuple[str, ...]
    layer: int
    compared: str


@dataclass(frozen=True)
class Manifest:
    """The hash of each file by its path below the folder, and the conversion that made them, if the file states it."""

    hashes: Mapping[str, str]
    origin: Origin | None

    def content(self) -> bytes:
        """Return the bytes of the file. Names are encoded as the file system stores them, even if not UTF-8."""
        first = [] if self.origin is None else [MARK + json.dumps(asdict(self.origin))]
        lines = [*first, *(_line(name, self.hashes[name]) for name in sorted(self.hashes))]
        return os.fsencode("\n".join(lines) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if there is none. Raises CheckpointError if the file is invalid."""
    path = folder / MANIFEST
    try:
        lines = os.fsdecode(read_bytes(path)).split("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "check the file") from None
    origin = next((_origin(line) for line in lines if line.startswith(MARK)), None)
    entries = [line for line in lines if line and not line.startswith("#")]
    strange = [line for line in entries if len(line.lstrip("\\").partition("  ")[0]) != 64]
    if strange:
        raise CheckpointError(f"{path} is not a list of sha256sum: {strange[0][:80]!r}", "check the file")
    return Manifest(dict(map(_entry, entries)), origin)


def _origin(line: str) -> Origin | None:
    try:
        values: dict[str, Any] = json.loads(line.removeprefix(MARK))
        compared = CHECKS[CHECKS.index(values["compared"])]
        return Origin(str(values["to"]), tuple(values["jobs"]), int(values["layer"]), compared)
    except (ValueError, KeyError, TypeError):
        return None


def _line(name: str, value: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return ("\\" if escaped != name else "") + f"{value}  {escaped}"


def _entry(line: str) -> tuple[str, str]:
    value, _, name = line.lstrip("\\").partition("  ")
    if line.startswith("\\"):
        pieces = name.split("\\\\")
        name = "\\".join(piece.replace("\\n", "\n").replace("\\r", "\r") for piece in pieces)
    return name, value


def changed(path: Path) -> UnsoundResult:
    """Return the error for a file of an unfinished output that has changed since it was written."""
    return UnsoundResult(
        f"{path} has changed since it was written: its sha256 differs",
        f"check the disk, then `rm {shell_word(path)}` and convert again: that writes this file again",
    )


def hash_file(path: Path, report: Callable[[int], None] | None = None, stop: threading.Event | None = None) -> str:
    """Return the SHA-256 of a file. Raises OSError, and Stopped once `stop` is set.

    Args:
        report: called with the number of bytes of each piece.
    """
    found = sha256()
    with open(open_file(path), "rb", buffering=0) as file:
        piece = memoryview(bytearray(CHUNK))
        while count := file.readinto(piece):
            found.update(piece[:count])
            if report is not None:
                report(count)
            if stop is not None and stop.is_set():
                raise Stopped
    return found.hexdigest()


def hash_files(paths: Iterable[Path], workers: int, progress: Progress | None = None) -> Iterator[str]:
    """Yield the hash of each file, in the order of the files; several are hashed at once. Raises OSError."""
    paths, lock, done, stop = tuple(paths), threading.Lock(), 0, threading.Event()
    total = sum(path.stat().st_size for path in paths)

    def report(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    with ThreadPoolExecutor(max(min(workers, len(paths)), 1)) as pool:
        tasks = [pool.submit(hash_file, path, report, stop) for path in paths]
        try:
            yield from (task.result() for task in tasks)
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
