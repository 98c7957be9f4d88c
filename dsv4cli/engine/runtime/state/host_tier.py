"""Host-memory tier of the prefix cache: states evicted from the GPU are copied here and restored on a hit.

Memory is divided into pages of one block of entries of all layers; a copy of ring buffers takes several. States share
pages as they share blocks: a block that has a page and was not written since is not copied again, in either direction.
Copies are ordered with kernel launches, and nothing waits for them.
"""

import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby
from time import sleep

import torch

from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache, Snapshot
from dsv4cli.engine.system.device import upload
from dsv4cli.engine.system.pinned import PageFaulter, host_block, pin, unpin, whole_pages
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels.card import is_there

# blocks that are gathered on the device at once: 48 MB for Flash
AT_ONCE = 64
# bytes to pin at once, shortly before their use: pinning all host memory would take seconds
PINNED_AT_ONCE = 1 << 26
# seconds between checks whether the system has committed the pages to pin
SOON = 1e-3
REMEDY = "lower --cache-memory"


@dataclass(frozen=True, eq=False)
class Stored:
    """A sequence at one length: pages of its blocks, and of its ring buffers."""

    length: int
    high: int
    blocks: tuple[int, ...]
    rings: tuple[int, ...]

    @property
    def pages(self) -> tuple[int, ...]:
        """All of its pages."""
        return self.blocks + self.rings


class HostTier:
    """Host memory for the states of one cache.

    Attributes:
        unpinned: why the system refused to pin memory; None if it did not. Copies are then synchronous and slower.
    """

    def __init__(self, cache: Cache, nbytes: int) -> None:
        """Allocate the pages of the tier. nbytes: maximum number of bytes to use."""
        self.unpinned: NotEnoughMemory | None = None
        self._cache = cache
        self._block = cache.block_bytes
        size = whole_pages(max(self._block, 1))
        self._pages = host_block(nbytes // size * size, "states of conversations", REMEDY).view(-1, size)
        self._pinned = 0 if is_there(cache.device) else len(self._pages)
        self._populating = PageFaulter(self._pages.view(-1))
        self._addresses: list[int] = []
        weakref.finalize(self, unpin, self._addresses).atexit = False
        self._shares = [0] * len(self._pages)
        self._free = list(range(len(self._pages) - 1, -1, -1))
        # device block -> its page, and the block's version when both were equal; and the reverse map
        self._page_of: dict[int, tuple[int, int]] = {}
        self._block_of: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use."""
        return (len(self._pages) - len(self._free)) * self._pages.shape[1]

    def prepare(self) -> bool:
        """Pin memory for the next states, or wait a moment for the system to allocate it. Return whether any was
        missing."""
        missing = self._missing
        if missing and not self.pin_next():
            sleep(SOON)
        return missing

    def pin_next(self) -> bool:
        """Pin some of what is missing, in 2 ms, if the system has allocated it. Return whether it has."""
        if not self._missing:
            return False
        self._populate()
        given = self._populating.nbytes >= self._pages[: self._pinned + self._pinned_pages].nbytes
        if given:
            self._pin()
        return given

    def could_hold(self, snapshot: Snapshot) -> bool:
        """Return whether an empty tier would have enough pages for the snapshot."""
        return len(snapshot.blocks) + self._ring_pages <= len(self._pages)

    def has_space_for(self, snapshot: Snapshot) -> bool:
        """Return whether there are enough free pages for what the snapshot does not share with stored states."""
        known = sum(self._known_page(block) is not None for block in snapshot.blocks)
        return len(snapshot.blocks) - known + self._ring_pages <= len(self._free)

    def store(self, snapshot: Snapshot) -> Stored:
        """Return a copy of the snapshot. There must be enough free pages."""
        if self._missing:
            self._populate()
        pages, fresh = [], []
        for block in snapshot.blocks:
            page = self._known_page(block)
            if page is None:
                page = self._take()
                self._pair(block, page)
                fresh.append((block, page))
            else:
                self._shares[page] += 1
            pages.append(page)
        for first in range(0, len(fresh), AT_ONCE):
            self._save_blocks(fresh[first : first + AT_ONCE])
        rings = sorted(self._take() for _ in range(self._ring_pages))
        for ours, theirs in self._ring_parts(rings, snapshot.rings.flat):
            ours.copy_(theirs, non_blocking=True)
        return Stored(snapshot.length, snapshot.high, tuple(pages), tuple(rings))

    def restore(self, sequence: Sequence, stored: Stored) -> None:
        """Restore a stored state into the sequence. The copy stays. Raises NotEnoughMemory."""
        self._cache.replace(sequence, [], (0, 0))  # first: the tokens fit only once
        for page in stored.pages:  # taking blocks may have others come here
            self._shares[page] += 1
        blocks, fresh = [], []
        for page in stored.blocks:
            block = self._known_block(page)
            if block is None:
                block = self._cache.take_block()
                fresh.append((block, page))
            else:
                self._cache.share_block(block)
            blocks.append(block)
        for first in range(0, len(fresh), AT_ONCE):
            self._load_blocks(fresh[first : first + AT_ONCE])
        for block, page in fresh:
            self._pair(block, page)
        self._cache.replace(sequence, blocks, (stored.length, stored.high))
        rings = self._cache.copies.take()
        for ours, theirs in self._ring_parts(stored.rings, rings.flat):
            theirs.copy_(ours, non_blocking=True)
        self._cache.copies.load(sequence.slot, rings)
        self._cache.copies.give_back(rings)
        self.drop(stored)

    def drop(self, stored: Stored) -> None:
        """Release a stored state's references to its pages."""
        for page in stored.pages:
            self._shares[page] -= 1
            if not self._shares[page]:
                self._free.append(page)
                self._block_of.pop(page, None)

    def recover(self, held: Items[Stored]) -> None:
        """Rebuild the bookkeeping so that only these states hold pages, after an interruption."""
        self._shares = [0] * len(self._pages)
        for stored in held:
            for page in stored.pages:
                self._shares[page] += 1
        self._free = [page for page in range(len(self._pages) - 1, -1, -1) if not self._shares[page]]
        self._page_of.clear()
        self._block_of.clear()

    @property
    def _ahead(self) -> int:
        """Return how many pages to keep pinned: those in use, plus one state for each sequence."""
        used = len(self._pages) - len(self._free)
        return min(used + self._cache.slots * (self._ring_pages + 1), len(self._pages))

    @property
    def _missing(self) -> bool:
        """Return whether some of these pages are not pinned yet."""
        return self._pinned < self._ahead

    @property
    def _pinned_pages(self) -> int:
        return max(PINNED_AT_ONCE // self._pages.shape[1], 1)

    @property
    def _ring_pages(self) -> int:
        return -(-self._cache.copies.nbytes // self._pages.shape[1])

    def _ring_parts(self, pages: Items[int], flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pages with the matching part of a copy of ring buffers, one contiguous piece of pinned memory at a
        time.
        """
        size, whole = self._pages.shape[1], self._pages.view(-1)
        for _, run in groupby(enumerate(pages), lambda each: (each[1] - each[0], each[1] // self._pinned_pages)):
            places = list(run)
            part = flat[places[0][0] * size : (places[-1][0] + 1) * size]
            yield whole[places[0][1] * size :][: len(part)], part

    def _populate(self) -> None:
        """Ask the system to allocate at least the memory that is pinned next."""
        self._populating.want(self._pages[: max(self._ahead, self._pinned + self._pinned_pages)].nbytes)

    def _take(self) -> int:
        page = self._free.pop()
        while page >= self._pinned:
            self._pin()
        self._shares[page] = 1
        return page

    def _pin(self) -> None:
        some = self._pages[self._pinned :][: self._pinned_pages]
        try:
            self._addresses.append(pin(some, REMEDY))
        except NotEnoughMemory as error:
            self.unpinned, self._pinned = error, len(self._pages)
        else:
            self._pinned += len(some)

    def _pair(self, block: int, page: int) -> None:
        """Record that a block and a page hold the same, until the block is written or one of them is freed."""
        self._page_of[block] = page, self._cache.version(block)
        self._block_of[page] = block

    def _known_page(self, block: int) -> int | None:
        page, version = self._page_of.get(block, (None, -1))
        same = page is not None and self._block_of.get(page) == block and self._cache.version(block) == version
        return page if same else None

    def _known_block(self, page: int) -> int | None:
        block = self._block_of.get(page)
        return block if block is not None and self._known_page(block) == page else None

    def _save_blocks(self, pairs: list[tuple[int, int]]) -> None:
        numbers = upload(torch.tensor([block for block, _ in pairs], device="cpu"), self._cache.device)
        for row, (_, page) in zip(self._cache.entries.read(numbers), pairs, strict=True):
            self._pages[page, : self._block].copy_(row, non_blocking=True)

    def _load_blocks(self, pairs: list[tuple[int, int]]) -> None:
        device = self._cache.device
        gathered = torch.empty(len(pairs), self._block, dtype=torch.uint8, device=device)
        for row, (_, page) in zip(gathered, pairs, strict=True):
            row.copy_(self._pages[page, : self._block], non_blocking=True)
        self._cache.entries.write(upload(torch.tensor([block for block, _ in pairs], device="cpu"), device), gathered)
