"""Which devices there are and how much memory they have free: this machine's, or those that a user names; no torch."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dsv4cli.errors import UsageError

MEMINFO = Path("/proc/meminfo")
# the limit of a container (cgroup v2), which /proc/meminfo does not know
CGROUP = Path("/sys/fs/cgroup")
NVIDIA_SMI = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
SMI_SECONDS = 10
UNITS = {"gb": 10**9, "gib": 2**30}
GPUS = re.compile(r"(?:(\d{1,4})[x×])?(\d{1,6}(?:\.\d{1,3})?)(GB|GiB)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU with the RAM. torch_name: what --device calls it. total, free: bytes."""

    torch_name: str
    name: str
    total: int
    free: int

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.torch_name.startswith("cuda")


@dataclass(frozen=True)
class Machine:
    """The GPUs in the order of their numbers; the CPU, None where only GPUs were named."""

    gpus: tuple[Device, ...]
    cpu: Device | None


def parse_gpus(text: str) -> Machine:
    """A machine of equal GPUs, as in '2x141GB', '8x80GiB' or '24GB'; GB is 10^9 bytes, GiB 2^30.

    Raises UsageError for anything else.
    """
    match = GPUS.fullmatch(text.strip())
    count = int(match[1] or 1) if match else 0
    size = int(float(match[2]) * UNITS[match[3].lower()]) if match else 0
    if not count or not size:
        raise UsageError(
            f"--gpus cannot be {text!r}", "say how many of which size: 2x141GB, 8x80GiB or 24GB (GB is 10^9 bytes)"
        )
    return Machine(tuple(Device(f"cuda:{number}", f"GPU of {text}", size, size) for number in range(count)), None)


def this_machine() -> Machine:
    """The GPUs that nvidia-smi tells of and the RAM; no GPU where nvidia-smi is absent, fails or hangs."""
    return Machine(_gpus(), _cpu())


def _gpus() -> tuple[Device, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run([program, *NVIDIA_SMI], capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines()]
    sized = [(number, row) for number, row in enumerate(rows) if len(row) == 3 and row[1].strip().isdigit()]
    # a GPU that shares the RAM says [N/A] instead of a number of MiB
    return tuple(
        Device(f"cuda:{number}", name.strip(), int(total) * 2**20, int(free) * 2**20)
        for number, (name, total, free) in sized
        if free.strip().isdigit()
    )


def _cpu() -> Device | None:
    values = _meminfo()
    if "MemTotal" not in values or "MemAvailable" not in values:
        return None
    total, free = values["MemTotal"], values["MemAvailable"]
    limit, used, cached = (_cgroup(name) for name in ("memory.max", "memory.current", "memory.stat:inactive_file"))
    if limit is not None:
        # pages of files count as used, but the kernel takes them back
        total, free = min(total, limit), max(min(free, limit - (used or 0) + (cached or 0)), 0)
    return Device("cpu", "RAM", total, free)


def _meminfo() -> dict[str, int]:
    """Bytes by the names of /proc/meminfo; empty where the system has no such file."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if line.endswith("kB")]
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _cgroup(name: str) -> int | None:
    """A number of the container's limits; of a file of many, the line 'key number' as in 'memory.stat:inactive_file'.
    None without a limit."""
    file, _, key = name.partition(":")
    try:
        text = (CGROUP / file).read_text(encoding="ascii")
    except OSError:
        return None
    values = [line.rpartition(" ") for line in text.splitlines()]
    return next((int(number) for word, _, number in values if word == key and number.isdigit()), None)
