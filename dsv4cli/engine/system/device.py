"""The device that a model runs on: its choice, transfers and free memory."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsv4cli.engine.settings import check_device
from dsv4cli.engine.system.host_memory import host_memory
from dsv4cli.errors import NotEnoughMemory, UnsupportedHardware
from dsv4cli.kernels.card import is_there

# on a CPU, one thread computes steps of up to this many tokens through weights of up to this many bytes
ONE_THREAD_TOKENS, ONE_THREAD_BYTES = 512, 64 * 10**6


def resolve_device(name: str) -> torch.device:
    """Return the device for a name: 'auto' (CUDA if there is a GPU, else the CPU), cpu, cuda or cuda:1.

    Raises UsageError for any other name and UnsupportedHardware for a GPU that does not exist.
    """
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UnsupportedHardware(
            f"--device {name} does not exist: PyTorch sees {count or 'no'} CUDA device{'' if count == 1 else 's'}",
            "use --device cpu" if not count else f"the last one is cuda:{count - 1}",
        )
    return device


def upload(numbers: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to a device without blocking; the copy to a GPU goes through pinned memory."""
    on_gpu = is_there(torch.device(device))
    return (numbers.pin_memory() if on_gpu else numbers).to(device, non_blocking=True)


def download(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Start a copy to the host after the work launched so far.

    Returns a function that waits for the copy and returns the values as a list.
    """
    if not is_there(numbers.device):
        there: list[Any] = numbers.tolist()
        return lambda: there
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True, device="cpu")
    host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[Any]:
        arrived.synchronize()
        found: list[Any] = host.tolist()
        return found

    return read


@contextmanager
def step_memory(device: torch.device | str, remedy: str = "lower --prefill-chunk or --max-context") -> Iterator[None]:
    """Raise NotEnoughMemory, with a remedy, if the code inside the block runs out of device memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise NotEnoughMemory(f"{device} ran out of memory: {reason}", remedy) from None


@contextmanager
def step_threads(tokens: int, weights: int) -> Iterator[None]:
    """Limit PyTorch to one CPU thread for a small step: few `tokens` through few bytes of `weights`.

    On two idle cores nano decodes about 33 tokens/s with one thread and with two. While two other programs compute,
    it decodes 16 to 22 tokens/s with one thread and 4 to 7 with two: a thread that waits for its core delays the other.
    """
    before = torch.get_num_threads()
    small = tokens <= ONE_THREAD_TOKENS and weights <= ONE_THREAD_BYTES
    if not small or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def free_unused() -> None:
    """Return the memory of unreferenced tensors to the devices."""
    gc.collect()  # modules and graphs may refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = host_memory()
    return None if memory is None else memory.free
