"""SHA256SUMS: a hash of every file of a finished output, as sha256sum writes and checks it; no torch.

Its first line, a comment to sha256sum, says which conversion the output is of. Readers of models know no such file.
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
    """Hashing has been called off."""


@dataclass(frozen=True)
class Origin:
    """What an output is made of. jobs: hashes of plan and source, of each machine. layer: of the source, the first.
    compared: with the source: full, sample or off."""

    to: str
    jobs: tuple[str, ...]
    layer: int
    compared: str


@dataclass(frozen=True)
class Manifest:
    """The hash of each file by its path below the folder, and where all of them come from, if the first line says."""

    hashes: Mapping[str, str]
    origin: Origin | None

    def content(self) -> bytes:
        """The bytes of the file, which has the names as the system keeps them, UTF-8 or not."""
        first = [] if self.origin is None else [MARK + json.dumps(asdict(self.origin))]
        lines = [*first, *(_line(name, self.hashes[name]) for name in sorted(self.hashes))]
        return os.fsencode("\n".join(lines) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, None where there is none. Raises CheckpointError for a file that is none."""
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
    """What is said of a file of an unfinished output whose bytes are not those that were written."""
    return UnsoundResult(
        f"{path} has changed since it was written: its sha256 differs",
        f"check the disk, then `rm {shell_word(path)}` and convert again: that writes this file again",
    )


def hash_file(path: Path, report: Callable[[int], None] | None = None, stop: threading.Event | None = None) -> str:
    """SHA-256 of a file; `report` gets the bytes of each piece. Raises OSError, and Stopped once `stop` is set."""
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
    """The hash of each file in their order, several at once. Raises OSError."""
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
