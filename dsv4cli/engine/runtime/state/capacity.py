"""How much a runner holds, and the memory that its cache and what it keeps for later requests get of that."""

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

    slots: sequences at once. longest: the most tokens of a sequence that steps captured in graphs are prepared for,
    None for no graphs. snapshots: states that are kept on the device for what begins alike; 0: none. drafts: whether
    the model's drafter takes part. chunks: whether chunks of prompts are captured too, which pays where many come.
    cache_memory: bytes of the device for the entries of all sequences and for kept states, of which there are as many
    as a part of it holds, whatever `snapshots` says; a request waits until it certainly has room. None: they take what
    they need. host_memory: bytes of host memory for states that the device has no room for.
    """

    slots: int = 1
    longest: int | None = None
    snapshots: int = 0
    drafts: bool = False
    chunks: bool = False
    cache_memory: int | None = None
    host_memory: int = 0


def prefixes_of(cache: Cache, capacity: Capacity, reads_next: bool) -> PrefixCache | None:
    """Bounds the cache, where it is to be, and makes its prefix cache, if any. Raises NotEnoughMemory for a bound that
    leaves no room for anything."""
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
