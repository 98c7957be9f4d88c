"""Describes the machine and the software of a measurement."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dsv4cli.version import __version__

CPUINFO = Path("/proc/cpuinfo")
CHECKOUT = Path(__file__).resolve().parents[3]
SECONDS = 10


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return device, driver, versions, processor and, in a git checkout of dsv4, the commit.

    Unknown values are None.
    """
    on_gpu = device.type == "cuda"
    index = device.index or 0
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={index}")
        if on_gpu
        else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "dsv4": __version__,
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit, with the suffix -dirty if files differ from it."""
    if not (CHECKOUT / ".git").exists():
        return None
    return _said("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _said(program: str, *arguments: str) -> str | None:
    """Return the first line that a program prints; None if it is missing, fails or hangs."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or None
