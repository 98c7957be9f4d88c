"""How many sequences and prefix-cache states a runner holds, and how its memory is divided."""

from dataclasses import dataclass

from dsv4cli.engine.runtime.state.cache import FEWEST_BLOCKS, Cache
from dsv4cli.engine.runtime.state.host_tier import HostTier
from dsv4cli.engine.runtime.state.prefix_cache import PrefixCache
from dsv4cli.errors import NotEnoughMemory

# the fewest tokens of a sequence that graphs are captured for when a request needs longer ones
FEWEST_TOKENS = 8192
# 1 / KEPT_PART of a bounded cache is for the ring buffers of cached states; Flash's are as large as 3,500 tokens
KEPT_PART = 4
# minimum bytes to count for a block: with sliding-window layers alone, a block has no data
LEAST_BLOCK = 1024


@dataclass(frozen=True)
class Capacity:
    """How many sequences and states a runner holds, and how much memory they use.

    Attributes:
        slots: sequences at once.
        longest: the longest sequence that graphs are captured for, tokens; None for no graphs.
        snapshots: states that the prefix cache keeps on the device; 0 for none.
        drafts: whether the model's drafter is used.
        chunks: whether prefill chunks are captured too, which pays off if many prompts arrive.
        cache_memory: bytes on the device for the entries of all sequences and for the prefix cache; a request waits
            until it is certain to fit. None: as much as they need. It overrides `snapshots`.
        host_memory: bytes of host memory for evicted states.
    """

    slots: int = 1
    longest: int | None = None
    snapshots: int = 0
    drafts: bool = False
    chunks: bool = False
    cache_memory: int | None = None
    host_memory: int = 0


def prefixes_of(cache: Cache, capacity: Capacity, reads_next: bool) -> PrefixCache | None:
    """Bound the cache, if `capacity` says so, and return its prefix cache, if any.

    Raises NotEnoughMemory if the bound is too small for any state.
    """
    most = capacity.snapshots
    if capacity.cache_memory is not None:
        most = max(capacity.cache_memory // KEPT_PART // cache.copies.nbytes, 1)
        each = max(cache.block_bytes, LEAST_BLOCK)
        blocks = (capacity.cache_memory - most * cache.copies.nbytes) // each
        if blocks < FEWEST_BLOCKS:
            least = KEPT_PART * cache.copies.nbytes + FEWEST_BLOCKS * each
            raise NotEnoughMemory(
                f"--cache-memory {capacity.cache_memory / 1e6:.4g}MB is too small for one conversation",
                f"use at least --cache-memory {-(-least // 100_000) / 10:.1f}MB",
            )
        cache.bound(blocks)
        cache.copies.provide(most)
    host = HostTier(cache, capacity.host_memory) if capacity.host_memory else None
    return PrefixCache(cache, most, reads_next, host) if most else None
