"""What a cache holds of a sequence, and whether two tensors are the same bits."""

from collections.abc import Iterator

import torch

from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache


def state(cache: Cache, sequence: Sequence) -> Iterator[torch.Tensor]:
    """All that the layers hold of a sequence: its rings, and its blocks of entries in order."""
    for layer in cache.layers:
        yield from (ring.data[sequence.slot] for ring in layer.rings())
        for pool in layer.pools():
            yield pool.data.unflatten(0, (-1, pool.per_block))[sequence.blocks]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, so that -0 is not 0 and NaN is NaN."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
