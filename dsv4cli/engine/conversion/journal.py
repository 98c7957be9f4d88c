"""Journal of a conversion: records what is synced to disk, so that an interrupted conversion can resume. No torch.

The folder `.dsv4-convert` inside the output contains the plan as JSON, unfinished files under their final names, and
one journal for each part of a shared job. A journal line is written after the bytes that it describes have been synced;
a line cut off by a crash is ignored. The journal also records the hash of each complete file and the result of the
last comparison with the source.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any, Literal

from dsv4cli.engine.checkpoint.headers import UNFINISHED
from dsv4cli.engine.settings import Part
from dsv4cli.engine.system import atomic
from dsv4cli.errors import CheckpointError, UsageError
from dsv4cli.harmless import shell_word

PLAN = "plan.json"
# maximum number of parts of a shared job
MAX_PARTS = 99_999
# of each file of the source: bytes, and modification time in ns
Times = dict[str, list[int]]


@dataclass(frozen=True)
class Verdict:
    """The result of the last comparison of a part with the source.

    Attributes:
        cut: number of the part's matrices that could not be compared, because other parts have the rest of them.
    """

    sound: bool
    check: Literal["sample", "full"]
    cut: int = 0


class Journal:
    """The journal of one part of one conversion.

    Attributes:
        batches: number of written batches of each unfinished file.
        hashes: hash of each complete file.
        verdict: None if a file was written since the last comparison. A bad verdict stays until everything is compared
            again.
    """

    def __init__(self, output: Path, part: Part) -> None:
        self.folder = output / UNFINISHED
        self.part = part
        self.path = self.folder / f"journal-{part.index}-of-{part.count}.jsonl"
        self.times: Times = {}
        self.batches: dict[str, int] = {}
        self.hashes: dict[str, str] = {}
        self.verdict: Verdict | None = None
        self._file = -1
        self._lock = Lock()

    @contextmanager
    def opened(self, plan: Mapping[str, Any], times: Times) -> Iterator["Journal"]:
        """Start a journal or continue the existing one, and lock it against other processes on the same part.

        Args:
            times: size and modification time of each file of the source.

        Raises UsageError if the folder has another plan, if the source has changed since the conversion began, or if
        another process has locked the journal.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        check_plan(self.folder, plan)
        with self._held(os.O_CREAT):
            # under the lock: of two processes that start at once, one must not continue the other's files
            begin_plan(self.folder, plan)
            if not self.times:
                self._append({"source": times})
                self.times = times
            elif self.times != times:
                raise UsageError(
                    f"the source has changed since the conversion into {self.folder.parent} began",
                    f"remove it with `rm -r {shell_word(self.folder.parent)}`, then convert again",
                )
            yield self

    @contextmanager
    def joined(self) -> Iterator["Journal"]:
        """Lock the journal of a finished part. Raises CheckpointError if there is none."""
        if not self.path.is_file():
            index, count = self.part.index, self.part.count
            raise CheckpointError(
                f"{self.folder.parent} contains no journal of part {index} of {count}",
                f"run the `dsv4 convert … --shard {index}/{count}` that writes it; of a part that was copied here, "
                f"copy the folder {UNFINISHED} too",
            )
        with self._held(0):
            yield self

    @contextmanager
    def _held(self, flags: int) -> Iterator[None]:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | flags, 0o644)
        try:
            _lock(self._file, self.path)
            self._read()
            yield
        finally:
            os.close(self._file)

    def _read(self) -> None:
        *lines, torn = self.path.read_bytes().split(b"\n")
        if torn:
            os.ftruncate(self._file, self.path.stat().st_size - len(torn))
        try:
            for line in lines:
                self._enter(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} is damaged: {error}",
                f"remove the output with `rm -r {shell_word(self.folder.parent)}`, then convert again",
            ) from None

    def _enter(self, entry: Mapping[str, Any]) -> None:
        if "source" in entry:
            self.times = dict(entry["source"])
        elif "verdict" in entry:
            self.verdict = Verdict(**entry["verdict"])
        elif "sha256" in entry:
            self.hashes[entry["file"]] = entry["sha256"]
            if self.verdict is not None and self.verdict.sound:
                self.verdict = None
        else:
            self.batches[entry["file"]] = entry["batches"]

    def record(self, file: str, batches: int) -> None:
        """Record that the first `batches` batches of a file are on disk."""
        self._append({"file": file, "batches": batches})

    def complete(self, file: str, sha256: str) -> None:
        """Record that a file is completely on disk, and its hash."""
        self._append({"file": file, "sha256": sha256})

    def judge(self, verdict: Verdict) -> None:
        """Record the result of comparing this part with the source."""
        self._append({"verdict": asdict(verdict)})

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self._lock:
            atomic.append(self._file, (json.dumps(entry) + "\n").encode())
            self._enter(entry)


def begin_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a conversion unless it exists. Raises as `check_plan`."""
    path = folder / PLAN
    if not path.exists():
        write_file(path, json.dumps(plan).encode(), folder)
    check_plan(folder, plan)


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Raise UsageError if the folder has another plan."""
    path = folder / PLAN
    if path.exists() and read_plan(path) != plan:
        raise UsageError(
            f"{folder.parent} contains an unfinished conversion of another source or with other options",
            f"repeat the command that began it, or remove it with `rm -r {shell_word(folder.parent)}`",
        )


def read_plan(path: Path) -> dict[str, Any]:
    """Return the plan of an unfinished conversion.

    Raises UsageError if there is none, CheckpointError if it is damaged.
    """
    try:
        plan: dict[str, Any] = json.loads(path.read_bytes())
        _check_plan(plan)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{path.parent.parent} contains no unfinished conversion", "use the output folder of `dsv4 convert --shard`"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}",
            f"remove the output with `rm -r {shell_word(path.parent.parent)}`, then convert again",
        ) from None
    return plan


def _check_plan(plan: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError, KeyError or AttributeError unless a plan is valid.

    A plan may come from another machine, so all its files must be inside the output.
    """
    files, metadata = plan["files"], plan["metadata"]
    sound = [type(file[key]) is int for file in files.values() for key in ("nbytes", "header_bytes")]
    sound += [isinstance(file["header"], str) for file in files.values()]
    sound += [isinstance(text, str) for text in metadata.values()]
    sound += [not Path(name).is_absolute() and ".." not in Path(name).parts for name in (*files, *metadata)]
    sound += [type(plan["parts"]) is int and 1 <= plan["parts"] <= MAX_PARTS, type(plan["layer"]) is int]
    sound += [isinstance(plan["to"], str), plan["index"] is None or isinstance(plan["index"], dict)]
    if not files or not all(sound):
        raise ValueError("it is not the plan of a conversion")


def write_file(path: Path, content: bytes, workshop: Path) -> None:
    """Write a file that appears complete or not at all, even after a crash. workshop: the journal's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_file(path, content, temporary_name(path, workshop))


def temporary_name(path: Path, workshop: Path) -> Path:
    """Return a name in the journal's folder that no other process uses, not even on another machine."""
    return workshop / f"{path.name}.{token_hex(8)}"


def _lock(descriptor: int, path: Path) -> None:
    # imported here: not every platform has it, and only conversions need it
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the process that held the lock may have finished and removed the folder
        held = os.fstat(descriptor).st_nlink > 0
    except BlockingIOError:
        held = False
    if not held:
        raise UsageError(f"another process is writing this part ({path.name})", "wait for it, or stop it first")
