"""The device that a model runs on, and whether it has room."""

from pathlib import Path

import torch

from dsv4cli.errors import NotEnoughMemory, UnsupportedHardware, UsageError

MEMINFO = Path("/proc/meminfo")


def resolve_device(name: str) -> torch.device:
    """'auto' is CUDA where there is a GPU, else the CPU; otherwise a torch device name: cpu, cuda, cuda:1.

    Raises UsageError for another name and UnsupportedHardware for a GPU that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name} is no device of this engine", "use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UnsupportedHardware(f"--device {name}: this machine has {count} CUDA devices", "use --device cpu")
    return device


def check_room(needed: int, device: torch.device) -> None:
    """Raises NotEnoughMemory when the weights, `needed` bytes, exceed what the device has free."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise NotEnoughMemory(
            f"the weights take {needed / 1e9:.2f} GB and {device} has {free / 1e9:.2f} GB free",
            "use a machine with more memory, or fewer layers of random weights: random:flash,layers=4,experts=16",
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes free on the device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not MEMINFO.is_file():
        return None
    values = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(values["MemAvailable"].split()[0]) * 1024
