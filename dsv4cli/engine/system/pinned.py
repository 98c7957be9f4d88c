"""Host memory that a GPU reads and writes in place; torch's own pinned memory takes a power of two."""

import mmap
from contextlib import suppress
from mmap import PAGESIZE

import torch

from dsv4cli.errors import NotEnoughMemory


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to pages of the system."""
    return -(-nbytes // PAGESIZE) * PAGESIZE


def host_block(nbytes: int, purpose: str, remedy: str) -> torch.Tensor:
    """Host memory that shares no page: uint8 [nbytes]. Some systems give its pages only with their use; where huge ones
    are to be had, a GPU reads faster (H200, an expert of Flash: 45.2 GB/s from small ones, 47.3 from huge ones). Raises
    NotEnoughMemory, which says what it is for."""
    try:
        memory = mmap.mmap(-1, whole_pages(max(nbytes, 1)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise NotEnoughMemory(
            f"the system does not give {nbytes / 1e9:.2f} GB of host memory for {purpose}", remedy
        ) from None
    with suppress(AttributeError, OSError):  # not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def pin(tensor: torch.Tensor, remedy: str) -> int:
    """Pins memory as it is; its address, for `unpin`. Raises NotEnoughMemory."""
    address = tensor.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, tensor.nbytes, 0)):
        raise NotEnoughMemory(
            f"the system does not pin {tensor.nbytes / 1e9:.2f} GB of host memory for the GPU",
            f"raise the limit of locked memory (ulimit -l), or {remedy}",
        )
    return address


def unpin(addresses: list[int]) -> None:
    """Lets go of what `pin` has pinned."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
