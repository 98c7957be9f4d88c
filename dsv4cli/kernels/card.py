"""Properties of the GPU. A CPU stands for Triton's interpreter, which supports everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch

# oldest compute capability for which Triton compiles bf16 and asynchronous copies (Ampere)
OLDEST = (8, 0)
# first compute capability with FP8 conversions and FP8 tensor cores (Ada)
FP8 = (8, 9)
# first with tensor cores that read shared memory, TMA and programmatic dependent launch (Hopper)
HOPPER = (9, 0)
# data center cards, with tensor memory; desktop cards, without it
BLACKWELL, RTX_BLACKWELL = (10, 0), (12, 0)
# bytes of shared memory that a program can use on Hopper
HOPPER_SHARED = 227 << 10


class Card(NamedTuple):
    """A GPU's compute capability, (0, 0) for AMD, and the maximum shared memory of a program in bytes."""

    capability: tuple[int, int]
    shared: int


# sizes of shared memory: CUDA C++ Programming Guide, technical specifications per compute capability
CARDS = {
    "a100": Card((8, 0), 163 << 10),
    "rtx3090": Card((8, 6), 99 << 10),
    "l40s": Card((8, 9), 99 << 10),
    "rtx4090": Card((8, 9), 99 << 10),
    "h100": Card((9, 0), HOPPER_SHARED),
    "h200": Card((9, 0), HOPPER_SHARED),
    "b200": Card((10, 0), 227 << 10),
    "rtx5090": Card((12, 0), 99 << 10),
}

# set by `described`, per thread
_described: ContextVar[Card | None] = ContextVar("card", default=None)


@contextmanager
def described(card: Card) -> Iterator[None]:
    """Treat every CUDA device as this card, in this thread, inside the block.

    The card is only simulated: nothing can be launched on it.
    """
    before = _described.set(card)
    try:
        yield
    finally:
        _described.reset(before)


def is_there(device: torch.device) -> bool:
    """Return whether the device is a real GPU, not one simulated by `described`."""
    return device.type == "cuda" and _described.get() is None


def card_of(device: torch.device) -> Card:
    """Return the device's card: the one set by `described`, otherwise the real one."""
    return _described.get() or real_card(device)


@cache
def real_card(device: torch.device) -> Card:
    """Query the properties of a real GPU."""
    capability = (0, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return Card(capability, int(shared))


def is_from(device: torch.device, capability: tuple[int, int]) -> bool:
    """Return whether this is an NVIDIA GPU with at least this compute capability, or a CPU.

    AMD's version numbers have the same form but another meaning.
    """
    return device.type != "cuda" or card_of(device).capability >= capability


def has_tensor_memory(device: torch.device) -> bool:
    """Return whether tensor cores accumulate in tensor memory: 512 columns of 128 fp32 per program."""
    return is_from(device, BLACKWELL) and not is_from(device, RTX_BLACKWELL)


def shared_memory(device: torch.device) -> int:
    """Return the maximum number of bytes of shared memory that one program can use."""
    return HOPPER_SHARED if device.type != "cuda" else card_of(device).shared


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 132, as on an H200, for a simulated card."""
    return _multiprocessors(device) if is_there(device) else 132


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def stages_that_fit(device: torch.device, most: int, each: int, rest: int = 0) -> int:
    """Return the number of pipeline stages for a loop over operands: `most`, or fewer if shared memory is too small.

    Before Hopper, and on sm_120, tensor cores read registers, which hold the operands of one step.

    Args:
        most: the number of stages that fits on Hopper.
        each: bytes of operands per stage.
        rest: other bytes of shared memory that the program needs.
    """
    return max(min(most, 1 + (shared_memory(device) - rest) // each), 2)


def has_fp8(x: torch.Tensor) -> bool:
    """Return whether the device of x can convert and multiply FP8."""
    return is_from(x.device, FP8)


def unsuited(device: torch.device) -> str | None:
    """Return the reason why the Triton kernels cannot run on this GPU, or None if they can."""
    if is_from(device, OLDEST):
        return None
    what = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return f"{what} is an AMD GPU, and the Triton kernels run on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{what} has compute capability {major}.{minor}, and the Triton kernels need 8.0 or newer"
