"""How many sequences and kept states a runner holds, and how its memory is divided."""

from dataclasses import dataclass

from dsv4cli.engine.runtime.state.cache import FEWEST_BLOCKS, Cache
from dsv4cli.engine.runtime.state.host_tier import HostTier
from dsv4cli.engine.runtime.state.prefix_cache import PrefixCache
from dsv4cli.errors import NotEnoughMemory

# the fewest tokens of a sequence that graphs are captured for when a request needs longer ones
FEWEST_TOKENS = 8192
# of a bounded cache, one part in so many is for the rings of kept states: Flash's take as much as 3,500 tokens
KEPT_PART = 4
# what a block takes at least: of layers that have windows only it is but a number
LEAST_BLOCK = 1024


@dataclass(frozen=True)
class Capacity:
    """How much a runner holds.

    Attributes:
        slots: sequences at once.
        longest: the longest sequence that graphs are captured for, tokens; None for no graphs.
        snapshots: states that the prefix cache keeps on the device; 0 for none.
        drafts: whether the model's drafter is used.
        chunks: whether prefill chunks are captured too, which pays if many prompts arrive.
        cache_memory: bytes on the device for entries of all sequences and for kept states; a request waits until it is
            certain to fit. None: as much as they need. It overrides `snapshots`.
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
                f"{capacity.cache_memory / 1e6:,.1f} MB of cache have no room for a conversation",
                f"give it at least {least / 1e6:,.1f} MB (--cache-memory)",
            )
        cache.bound(blocks)
        cache.copies.provide(most)
    host = HostTier(cache, capacity.host_memory) if capacity.host_memory else None
    return PrefixCache(cache, most, reads_next, host) if most else None
