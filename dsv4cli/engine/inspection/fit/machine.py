"""Devices and their free memory: of this machine, or as named by the user; no torch."""

import re
import shutil
import subprocess
from dataclasses import dataclass, replace

from dsv4cli.engine.inspection.fit.cards import CARDS, bare_name
from dsv4cli.engine.system.host_memory import host_memory
from dsv4cli.errors import UsageError

NVIDIA_SMI = ("--query-gpu=name,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
SMI_SECONDS = 10
CAPABILITY = re.compile(r"(\d+)\.(\d+)", re.ASCII)
# the compute capability from which the kernels run, as kernels/card.py has it, which loads torch
OLDEST = (8, 0)
GPUS = re.compile(r"(?:(\d{1,4})\s*[x×]\s*)?(\S.*)", re.ASCII | re.IGNORECASE)
# labels of GPUs and machines that say GB or TB mean GiB and TiB
UNITS = {"G": 2**30, "T": 2**40}
LABEL = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([GT])i?B", re.ASCII | re.IGNORECASE)
# percentage of the labeled size that is free when nothing runs
FREE_OF_GPU, FREE_OF_RAM = 98, 95
# a GPU that a user names by its size
SIZED = "GPU of "


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU with its RAM. torch_name: its name for --device. total, free: bytes."""

    torch_name: str
    name: str
    total: int
    free: int

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.torch_name.startswith("cuda")

    @property
    def label(self) -> str:
        """The name of such a GPU for --gpus."""
        name = bare_name(self.name)
        if name in CARDS:
            return name
        return self.name.removeprefix(SIZED) if self.name.startswith(SIZED) else f"{round(self.total / 2**30)}GB"


@dataclass(frozen=True)
class OlderGpu:
    """A GPU that the kernels do not support. capability: its compute capability, as in '7.5'."""

    torch_name: str
    name: str
    capability: str


@dataclass(frozen=True)
class Machine:
    """The GPUs by number, and the CPU (None if its memory is unknown).

    Attributes:
        is_here: whether it is this machine.
        claims_ram: whether the user stated this machine's RAM, of which the system may report less.
        older: unsupported GPUs, which are not used.
    """

    gpus: tuple[Device, ...]
    cpu: Device | None
    is_here: bool = True
    claims_ram: bool = False
    older: tuple[OlderGpu, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices."""
        return self.gpus if self.cpu is None else (*self.gpus, self.cpu)

    @property
    def host(self) -> int:
        """Known free host memory in bytes."""
        return 0 if self.cpu is None else self.cpu.free

    @property
    def is_mixed(self) -> bool:
        """Whether the GPUs are of several kinds, so that CUDA numbers them fastest first, unlike nvidia-smi."""
        return len({*(gpu.name for gpu in self.gpus), *(gpu.name for gpu in self.older)}) > 1

    @property
    def automatic(self) -> str:
        """The choice of `--device auto`, whether the kernels support it or not."""
        return "cuda:0" if self.gpus or self.older else "cpu"


def parse_machine(gpus: str | None, ram: str | None) -> Machine:
    """Return this machine, or one with GPUs as in '2xH100', '24GB,48GB' or '8x80GB' and RAM as in '192GB'.

    Sizes are nominal, as printed on cards and machines: GiB, with a small part already in use. Raises UsageError.
    """
    cpu = None if ram is None else _named_ram(ram)
    if gpus is None:
        here = this_machine()
        return here if cpu is None else replace(here, cpu=cpu, claims_ram=True)
    named = [gpu for part in gpus.split(",") for gpu in _named_gpus(part.strip(), gpus)]
    return Machine(tuple(Device(f"cuda:{number}", *gpu) for number, gpu in enumerate(named)), cpu, is_here=False)


def _named_gpus(part: str, text: str) -> list[tuple[str, int, int]]:
    """Return name, total bytes and free bytes of each GPU that a part of the text names. Raises UsageError."""
    match = GPUS.fullmatch(part)
    count, name = (int(match[1] or 1), match[2]) if match else (0, "")
    known = CARDS[bare].mib * 2**20 if (bare := bare_name(name)) in CARDS else 0
    size = known or _label(name, "G")
    if not count or not size:
        raise UsageError(
            f"--gpus cannot be {text!r}",
            f"give the number and the size or kind: 2x141GB, 24GB,48GB or 2xH100 (known: {', '.join(CARDS)})",
        )
    return [(name if known else SIZED + "".join(name.split()), size, size * FREE_OF_GPU // 100)] * count


def _named_ram(text: str) -> Device:
    size = _label(text.strip(), "GT")
    if not size:
        raise UsageError(f"--ram cannot be {text!r}", "give the RAM of the machine: --ram 192GB")
    return Device("cpu", "RAM", size, size * FREE_OF_RAM // 100)


def _label(text: str, letters: str) -> int:
    """Return the bytes of a size such as 24GB with one of these unit letters, 0 for any other text."""
    match = LABEL.fullmatch(text)
    letter = match[2].upper() if match else ""
    return int(float(match[1]) * UNITS[letter]) if match and letter in letters else 0


def this_machine() -> Machine:
    """Return the GPUs that nvidia-smi reports and the RAM; no GPU if nvidia-smi is missing, fails or hangs."""
    gpus: list[Device] = []
    older: list[OlderGpu] = []
    for number, row in enumerate(_rows()):
        if len(row) != 4:
            continue
        torch_name, (name, total, free, capability) = f"cuda:{number}", (part.strip() for part in row)
        parts = CAPABILITY.fullmatch(capability)
        if parts and (int(parts[1]), int(parts[2])) < OLDEST:
            older.append(OlderGpu(torch_name, name, capability))
        elif total.isdigit() and free.isdigit():  # one that shares the RAM says [N/A] instead of a number of MiB
            gpus.append(Device(torch_name, name, int(total) * 2**20, int(free) * 2**20))
    return Machine(tuple(gpus), _cpu(), older=tuple(older))


def _rows() -> list[list[str]]:
    """Return nvidia-smi's row for each GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *NVIDIA_SMI], capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rsplit(",", 3) for line in done.stdout.splitlines()]


def _cpu() -> Device | None:
    memory = host_memory()
    return None if memory is None else Device("cpu", "RAM", *memory)
