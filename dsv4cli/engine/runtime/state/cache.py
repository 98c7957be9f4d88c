"""The KV cache: sliding-window ring buffers and open compression windows per slot, compressed entries in blocks.

A ring buffer holds the last rows of a sequence, position p in row p mod capacity. Its capacity is what a step can read
plus `ROLLBACK` rows, so that rolling back only changes the length: positions say which rows are valid. Compressed
entries are in blocks of 128 tokens, shared by all layers and addressed through a sequence's block table. A block that
a snapshot also holds is copied before it is written.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, ROLLBACK
from dsv4cli.engine.config.layer_kind import CSA, LAYER_KINDS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.rope import frequencies
from dsv4cli.engine.model.state import CompressorState, LayerCache, Pool, Ring
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.block_pool import BlockPool
from dsv4cli.engine.runtime.state.ring_snapshots import RingSnapshot, RingSnapshots
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels.formats import FP4_BLOCK

# blocks that are made when the first is taken
FEWEST_BLOCKS = 8


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A sequence at one length: a copy of its ring buffers, and references to its blocks. Drop it after use."""

    length: int
    high: int
    blocks: tuple[int, ...]
    rings: RingSnapshot


def evicts_nothing() -> bool:
    """Evict nothing and return False."""
    return False


class Cache:
    """The KV cache of up to `slots` sequences of one model on one device.

    Blocks are allocated as sequences grow, or all at once if their number is bounded.

    Attributes:
        copies: the ring buffers.
        entries: the blocks.
        evict_one: called if a bounded cache has no free block; evicts a state and returns whether there was one. Set by
            the prefix cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        slots: int = 1,
        device: torch.device | str = "cpu",
        rollback: int = ROLLBACK,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.slots = slots
        self.rollback = rollback
        self.frequencies = {ratio: frequencies(config, ratio).to(self.device) for ratio in LAYER_KINDS}
        self.layers = [self._layer(ratio, numerics, slots) for ratio in config.compress_ratios]
        self.copies = RingSnapshots([ring for layer in self.layers for ring in layer.rings()], self.device)
        self.entries = BlockPool([pool for layer in self.layers for pool in layer.pools()], self.device)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._shares: list[int] = []  # per block: how many sequences and snapshots hold it
        self._versions: list[int] = []  # per block: how often it was taken or may have been written
        self._free_blocks: list[int] = []
        self.evict_one: Callable[[], bool] = evicts_nothing
        self.bounded = False

    def _layer(self, ratio: int, numerics: Numerics, slots: int) -> LayerCache:
        config = self.config
        window = config.sliding_window + self.rollback
        layer = LayerCache(_ring(slots, window, config.head_dim, numerics.dtype, 0.0))
        if ratio:
            kv, score = self._open_rows(ratio, config.head_dim, slots)
            layer.compressed = CompressorState(kv, score, self._pool(ratio, config.head_dim, numerics.dtype))
        if ratio == CSA:
            layer.index = self._index(config.index_head_dim, numerics, slots)
        return layer

    def _index(self, width: int, numerics: Numerics, slots: int) -> CompressorState:
        kv, score = self._open_rows(4, width, slots)
        if not numerics.simulate:
            return CompressorState(kv, score, self._pool(4, width, numerics.dtype))
        # rounded entries: two codes per byte, and their e8m0 scales
        codes, scale = self._pool(4, width // 2, torch.int8), self._pool(4, width // FP4_BLOCK, torch.uint8)
        return CompressorState(kv, score, codes, scale)

    def _open_rows(self, ratio: int, width: int, slots: int) -> tuple[Ring, Ring]:
        span, channels = (2 * ratio, 2 * width) if ratio == CSA else (ratio, width)
        kv, score = (_ring(slots, span + self.rollback, channels, torch.float32, empty) for empty in (0.0, -inf))
        return kv, score

    def _pool(self, ratio: int, width: int, dtype: torch.dtype) -> Pool:
        return Pool(torch.zeros(0, width, dtype=dtype, device=self.device), BLOCK_TOKENS // ratio)

    @property
    def free_slots(self) -> int:
        """How many more sequences can be allocated."""
        return len(self._free_slots)

    @property
    def blocks(self) -> int:
        """The number of allocated blocks. When it changes, the pools have moved."""
        return len(self._shares)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block across all layers."""
        return self.entries.nbytes

    @property
    def free_blocks(self) -> int:
        """Blocks that can be used without growing the pools."""
        return len(self._free_blocks)

    @property
    def used_blocks(self) -> int:
        """Blocks held by sequences or snapshots."""
        return len(self._shares) - len(self._free_blocks)

    def allocate(self) -> Sequence:
        """Return a new, empty sequence in a cleared slot. Raises NotEnoughMemory if all slots are in use."""
        if not self._free_slots:
            raise NotEnoughMemory(
                "every slot of the cache is taken", "free a sequence or build the cache with more slots"
            )
        sequence = Sequence(self._free_slots.pop())
        self.copies.reset(sequence.slot)
        return sequence

    def free(self, sequence: Sequence) -> None:
        """Free the sequence's slot and its references to blocks."""
        self._release(sequence.blocks)
        self._free_slots.append(sequence.slot)

    def provide(self, blocks: int) -> None:
        """Grow the pools to this many blocks in advance. A bounded cache has all its blocks already."""
        if blocks > self.blocks and not self.bounded:
            self.entries.grow(blocks)
            self._count(blocks)

    def bound(self, blocks: int) -> None:
        """Allocate all blocks and never more. Call it before any block is allocated."""
        self.entries.make(blocks)
        self._count(blocks)
        self.bounded = True

    def _count(self, blocks: int) -> None:
        """Update the bookkeeping to this many blocks."""
        missing = blocks - self.blocks
        self._free_blocks = [*range(blocks - 1, self.blocks - 1, -1), *self._free_blocks]
        self._shares += [0] * missing
        self._versions += [0] * missing

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Reserve blocks for the next `tokens` tokens, none of them shared with a snapshot."""
        first, end = sequence.length // BLOCK_TOKENS, blocks_of(sequence.length + tokens)
        for number in range(first, min(end, len(sequence.blocks))):
            block = sequence.blocks[number]
            self._versions[block] += 1
            if self._shares[block] > 1:
                self._find_free_block()
            if self._shares[block] > 1:  # otherwise its other holders were evicted
                sequence.blocks[number] = self.take_block()
                sequence.changes += 1
                self.entries.copy(block, sequence.blocks[number])
                self._release([block])
        while len(sequence.blocks) < end:
            sequence.blocks.append(self.take_block())
            sequence.changes += 1

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """Add `tokens` tokens that a step has stored to the length."""
        sequence.length += tokens
        sequence.high = max(sequence.high, sequence.length)

    def touch(self, sequence: Sequence, tokens: int) -> None:
        """Record that a step overwrites the rows of the next `tokens` tokens, whether or not it stores them."""
        sequence.high = max(sequence.high, sequence.length + tokens)

    def roll_back(self, sequence: Sequence, tokens: int) -> None:
        """Remove the last `tokens` tokens; at most `ROLLBACK` below the longest length so far."""
        length = sequence.length - tokens
        if tokens < 0 or length < 0 or sequence.high - length > self.rollback:
            raise ValueError(f"cannot take {tokens} tokens back from {sequence}: the rings keep {self.rollback}")
        sequence.length = length

    def snapshot(self, sequence: Sequence) -> Snapshot:
        """Return a snapshot of the sequence, which can be restored into any sequence of this cache."""
        rings = self.copies.take()
        self.copies.save(sequence.slot, rings)
        blocks = tuple(sequence.blocks[: blocks_of(sequence.length)])
        self._share(blocks)
        return Snapshot(sequence.length, sequence.high, blocks, rings)

    def restore(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Restore a snapshot into the sequence. The snapshot stays valid."""
        self._share(snapshot.blocks)
        self.replace(sequence, list(snapshot.blocks), (snapshot.length, snapshot.high))
        self.copies.load(sequence.slot, snapshot.rings)

    def replace(self, sequence: Sequence, blocks: list[int], lengths: tuple[int, int]) -> None:
        """Replace the sequence's blocks by others that it already references. lengths: its new `length` and `high`."""
        self._release(sequence.blocks)
        sequence.blocks = blocks
        sequence.length, sequence.high = lengths
        sequence.changes += 1

    def drop(self, snapshot: Snapshot) -> None:
        """Release a snapshot's references to blocks. It must not be used afterwards."""
        self._release(snapshot.blocks)
        self.copies.give_back(snapshot.rings)

    def frees(self, snapshot: Snapshot) -> bool:
        """Return whether dropping the snapshot frees a block."""
        return any(self._shares[block] == 1 for block in snapshot.blocks)

    def recover(self, sequences: Items[Sequence], snapshots: Items[Snapshot]) -> None:
        """Rebuild the bookkeeping so that only these hold slots and blocks, after an interruption."""
        shares = [0] * self.blocks
        for blocks in [one.blocks for one in sequences] + [list(one.blocks) for one in snapshots]:
            for block in blocks:
                shares[block] += 1
        taken = {sequence.slot for sequence in sequences}
        self._shares = shares
        self._free_blocks = [block for block in range(self.blocks - 1, -1, -1) if not shares[block]]
        self._free_slots = [slot for slot in range(self.slots - 1, -1, -1) if slot not in taken]

    def version(self, block: int) -> int:
        """Return a number that changes whenever the block is written; -1 for a free block."""
        return self._versions[block] if self._shares[block] else -1

    def take_block(self) -> int:
        """Return a free block with one reference. Raises NotEnoughMemory if nothing can be evicted."""
        self._find_free_block()
        block = self._free_blocks.pop()
        self._shares[block] = 1
        self._versions[block] += 1
        return block

    def share_block(self, block: int) -> None:
        """Add a reference to a block in use."""
        self._share((block,))

    def _find_free_block(self) -> None:
        while not self._free_blocks:
            if not self.bounded:
                self.provide(max(2 * self.blocks, FEWEST_BLOCKS))
            elif not self.evict_one():
                raise NotEnoughMemory(
                    f"all {self.blocks:,} blocks of the cache are taken", "end a sequence or give the cache more memory"
                )

    def _share(self, blocks: Items[int]) -> None:
        for block in blocks:
            self._shares[block] += 1

    def _release(self, blocks: Items[int]) -> None:
        for block in blocks:
            self._shares[block] -= 1
            if not self._shares[block]:
                self._free_blocks.append(block)


def _ring(slots: int, capacity: int, width: int, dtype: torch.dtype, empty: float) -> Ring:
    """Return a ring buffer whose memory is allocated later, with that of others."""
    return Ring(torch.empty(slots, capacity, width, dtype=dtype, device="meta"), empty)


def blocks_of(tokens: int) -> int:
    """Return the number of blocks for this many tokens of a sequence."""
    return -(-tokens // BLOCK_TOKENS)
