"""Pinned (page-locked) host memory; torch's own allocator rounds every block up to a power of two."""

import ctypes
import mmap
from contextlib import suppress
from mmap import PAGESIZE
from threading import Thread

import torch

from dsv4cli.errors import NotEnoughMemory

# Linux, madvise(2): pages are given now, as if they were written, and what they hold stays; since 5.14
POPULATE_WRITE = 23
# bytes that are populated at once: 4 ms
POPULATED_AT_ONCE = 1 << 24


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole system pages."""
    return -(-nbytes // PAGESIZE) * PAGESIZE


def host_block(nbytes: int, purpose: str, remedy: str) -> torch.Tensor:
    """Allocate a page-aligned block of host memory as uint8 [nbytes], in huge pages where available.

    Some systems commit pages only at their first use. A GPU reads huge pages faster (H200, an expert of Flash: 47.3
    GB/s
    against 45.2 GB/s). Raises NotEnoughMemory, which names `purpose`.
    """
    try:
        memory = mmap.mmap(-1, whole_pages(max(nbytes, 1)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise NotEnoughMemory(f"cannot allocate {nbytes / 1e9:.2f} GB of host memory for {purpose}", remedy) from None
    with suppress(AttributeError, OSError):  # not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


class PageFaulter:
    """A background thread that commits the pages of a host block before their use; their content is kept.

    Pinning uncommitted pages takes eight times as long. The thread ends when all wanted pages are committed.
    """

    def __init__(self, block: torch.Tensor) -> None:
        """Create the thread for a block from `host_block`; `want` starts it."""
        self._block, self._wanted, self._thread = block, 0, Thread()
        # committed bytes from the start of the block; they also count if the system cannot commit pages this way
        self.nbytes = 0

    def want(self, nbytes: int) -> None:
        """Request that the first `nbytes` of the block be committed."""
        self._wanted = min(nbytes, len(self._block))
        if self.nbytes < self._wanted and not self._thread.is_alive():
            self._thread = Thread(target=self._populate, name="host memory", daemon=True)
            self._thread.start()

    def _populate(self) -> None:
        library = ctypes.CDLL(None)  # its functions release the GIL
        while self.nbytes < self._wanted:
            part = self._block[self.nbytes :][:POPULATED_AT_ONCE]
            address, size = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(whole_pages(len(part)))
            library.madvise(address, size, POPULATE_WRITE)
            self.nbytes += len(part)


def pin(tensor: torch.Tensor, remedy: str) -> int:
    """Pin existing memory and return its address, for `unpin`. Raises NotEnoughMemory."""
    address = tensor.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, tensor.nbytes, 0)):
        raise NotEnoughMemory(
            f"cannot pin {tensor.nbytes / 1e9:.2f} GB of host memory for the GPU",
            f"raise the limit of locked memory (ulimit -l), or {remedy}",
        )
    return address


def unpin(addresses: list[int]) -> None:
    """Unpin memory that `pin` has pinned."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
