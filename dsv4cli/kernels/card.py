"""What a GPU has and can do, asked of the card; a CPU is the interpreter's, which has and can everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch

# Triton's compiler takes bf16 and asynchronous copies from here on (Ampere)
OLDEST = (8, 0)
# the first with FP8: conversions and tensor cores (Ada)
FP8 = (8, 9)
# the first with tensor cores that read shared memory, TMA and dependent launches (Hopper)
HOPPER = (9, 0)
# data centre cards with tensor memory, and after them those for desktops, which have none
BLACKWELL, RTX_BLACKWELL = (10, 0), (12, 0)
# bytes that a program may take on Hopper
HOPPER_SHARED = 227 << 10


class Card(NamedTuple):
    """A compute capability, (0, 0) of an AMD GPU, and the bytes of shared memory that a program may take."""

    capability: tuple[int, int]
    shared: int


# by name; shared memory: CUDA C++ Programming Guide, technical specifications per compute capability
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

# what `described` has set, in each thread for itself
_described: ContextVar[Card | None] = ContextVar("card", default=None)


@contextmanager
def described(card: Card) -> Iterator[None]:
    """Inside, in this thread, every CUDA device is this card, which is not there: nothing can be launched on it."""
    before = _described.set(card)
    try:
        yield
    finally:
        _described.reset(before)


def is_there(device: torch.device) -> bool:
    """Whether this is a GPU, and not only described."""
    return device.type == "cuda" and _described.get() is None


def card_of(device: torch.device) -> Card:
    """What a GPU is."""
    return _described.get() or asked(device)


@cache
def asked(device: torch.device) -> Card:
    """What a GPU that is there says of itself."""
    capability = (0, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return Card(capability, int(shared))


def is_from(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether this is an NVIDIA GPU of at least this compute capability; AMD's numbers are others of the same form."""
    return device.type != "cuda" or card_of(device).capability >= capability


def has_tensor_memory(device: torch.device) -> bool:
    """Whether tensor cores add up in a memory of their own, of which a program has 512 columns of 128 fp32."""
    return is_from(device, BLACKWELL) and not is_from(device, RTX_BLACKWELL)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take."""
    return HOPPER_SHARED if device.type != "cuda" else card_of(device).shared


def multiprocessors(device: torch.device) -> int:
    """How many programs that leave room for no other run at once; of a card that is only described, an H200's."""
    return _multiprocessors(device) if is_there(device) else 132


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def stages_that_fit(device: torch.device, most: int, each: int, rest: int = 0) -> int:
    """Steps of a loop over operands that may be on their way at once: `most`, which fit Hopper, or fewer where a step's
    `each` bytes and the `rest` that a program takes beside them leave no room.

    Tensor cores before Hopper, and those of sm_120, read registers: the operands of one step lie there.
    """
    return max(min(most, 1 + (shared_memory(device) - rest) // each), 2)


def has_fp8(x: torch.Tensor) -> bool:
    """Whether the device of x converts and multiplies FP8."""
    return is_from(x.device, FP8)


def unsuited(device: torch.device) -> str | None:
    """Why the Triton kernels do not run on this GPU; None where they do."""
    if is_from(device, OLDEST):
        return None
    what = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return f"{what} is an AMD GPU, and the Triton kernels run on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{what} has compute capability {major}.{minor}, and the Triton kernels need 8.0 or newer"
