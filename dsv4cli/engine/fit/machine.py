"""Which devices there are and how much memory they have free: this machine's, or those that a user names; no torch."""

import re
import shutil
import subprocess
from dataclasses import dataclass

from dsv4cli.engine.host_memory import host_memory
from dsv4cli.errors import UsageError

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
    memory = host_memory()
    return None if memory is None else Device("cpu", "RAM", *memory)
