"""The memory of the host: what the machine has, within the limits of control groups (containers, jobs); no torch."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEMINFO = Path("/proc/meminfo")
# this process's control groups, and where their files lie
GROUPS = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")
# of cgroup v2 and v1: the limit, what is used, and among it the pages of files, which the kernel takes back
FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}

# where there are no such files, as on macOS: what its pages are used for
VM_STAT, SECONDS = "/usr/bin/vm_stat", 5
FREE_PAGES = ("free", "inactive", "speculative")


class HostMemory(NamedTuple):
    """Bytes; free: what programs can still have, for which the kernel gives up pages of files."""

    total: int
    free: int


def host_memory() -> HostMemory | None:
    """What this process may have; None where the system does not tell."""
    values = _values(MEMINFO)
    if "MemTotal:" not in values or "MemAvailable:" not in values:
        return _of_a_mac()
    total, free = values["MemTotal:"] * 1024, values["MemAvailable:"] * 1024
    for limit, left in _limits():
        total, free = min(total, limit), min(free, max(left, 0))
    return HostMemory(total, free)


def _of_a_mac() -> HostMemory | None:
    """What vm_stat shows: the pages that nobody uses, and those of files."""
    try:
        printed = subprocess.run([VM_STAT], capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    size = re.search(r"page size of (\d+) bytes", printed)
    pages = dict(re.findall(r"^Pages (\w+): +(\d+)\.$", printed, re.MULTILINE))
    if size is None or "free" not in pages:
        return None
    return HostMemory(total, int(size[1]) * sum(int(pages.get(name, 0)) for name in FREE_PAGES))


def _limits() -> Iterator[tuple[int, int]]:
    """Of every control group around this process that has a limit: the limit, and what is left."""
    for kind, folder in _groups():
        limit_file, used_file, names = FILES[kind]
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None:
            pages = _values(folder / "memory.stat")
            yield limit, limit - used + sum(pages.get(name, 0) for name in names)


def _groups() -> Iterator[tuple[str, Path]]:
    """The control groups that count memory, each with those that it is in; in a container they may not be there."""
    for line in _lines(GROUPS):
        _, controllers, path = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind in FILES:
            top = CGROUP / kind
            inner = top / path.lstrip("/")
            yield from ((kind, folder) for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def _number(file: Path) -> int | None:
    """What a file of one number holds; None for 'max'."""
    return next((int(line) for line in _lines(file) if line.isdigit()), None)


def _values(file: Path) -> dict[str, int]:
    """The numbers of a file by the words before them."""
    rows = [line.split() for line in _lines(file)]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(file: Path) -> list[str]:
    """A file's lines; none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
