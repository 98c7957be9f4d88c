"""Host memory of the machine, within the limits of its cgroups (containers, jobs); no torch."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEMINFO = Path("/proc/meminfo")
# this process's control groups, and the root of their files
GROUPS = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")
# cgroup v2 and v1: limit, usage, and the file-backed part of the usage, which the kernel can reclaim
FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}

# without these files, on macOS: the tool that reports page usage
VM_STAT, SECONDS = "/usr/bin/vm_stat", 5
FREE_PAGES = ("free", "inactive", "speculative")


class HostMemory(NamedTuple):
    """Host memory in bytes. free: what programs can still allocate, including page cache that the kernel can drop."""

    total: int
    free: int


def host_memory() -> HostMemory | None:
    """Return the memory that this process may use, None if the system does not report it."""
    values = _values(MEMINFO)
    if "MemTotal:" not in values or "MemAvailable:" not in values:
        return _of_a_mac()
    total, free = values["MemTotal:"] * 1024, values["MemAvailable:"] * 1024
    for limit, left in _limits():
        total, free = min(total, limit), min(free, max(left, 0))
    return HostMemory(total, free)


def _of_a_mac() -> HostMemory | None:
    """Return the available memory on macOS according to vm_stat: free and file-backed pages."""
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
    """Yield (limit, bytes left) of every cgroup around this process that has a memory limit."""
    for kind, folder in _groups():
        limit_file, used_file, names = FILES[kind]
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None:
            pages = _values(folder / "memory.stat")
            yield limit, limit - used + sum(pages.get(name, 0) for name in names)


def _groups() -> Iterator[tuple[str, Path]]:
    """Yield (kind, folder) of each memory cgroup and of its parents; in a container they may not exist."""
    for line in _lines(GROUPS):
        _, controllers, path = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind in FILES:
            top = CGROUP / kind
            inner = top / path.lstrip("/")
            yield from ((kind, folder) for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def _number(file: Path) -> int | None:
    """Return the number in a file that holds one; None for 'max'."""
    return next((int(line) for line in _lines(file) if line.isdigit()), None)


def _values(file: Path) -> dict[str, int]:
    """Return the numbers of a file, keyed by the word before each."""
    rows = [line.split() for line in _lines(file)]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(file: Path) -> list[str]:
    """Return the lines of a file, none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
