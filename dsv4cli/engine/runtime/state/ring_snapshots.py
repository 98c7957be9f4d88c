"""Memory of a cache's ring buffers, and reusable copies of one slot's ring buffers.

Ring buffers of one kind are one tensor, so that copying a slot takes a few launches: Flash has 167 of 7 kinds.
"""

from collections.abc import Sequence

import torch

from dsv4cli.engine.model.state import Ring

# alignment in bytes of each kind of ring buffer in a copy, sufficient for any dtype
ALIGNMENT = 16


class RingSnapshot:
    """A copy of one slot's ring buffers: uint8 [n], and views of each kind [rings, capacity, D]."""

    def __init__(self, flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.flat, self.parts = flat, parts


class RingSnapshots:
    """The ring buffers of one cache, and copies of them.

    Attributes:
        nbytes: bytes of one copy.
    """

    def __init__(self, rings: Sequence[Ring], device: torch.device) -> None:
        """rings: ring buffers without memory, which is allocated here."""
        kinds: dict[tuple[torch.Size, torch.dtype, float], list[Ring]] = {}
        for ring in rings:
            kinds.setdefault((ring.data.shape, ring.data.dtype, ring.empty), []).append(ring)
        # per kind: data [rings, slots, capacity, D], and the value of rows never written
        self._kinds: list[tuple[torch.Tensor, float]] = []
        self._starts = [0]
        for (shape, dtype, empty), own in kinds.items():
            memory = torch.zeros(len(own), *shape, dtype=dtype, device=device)
            for ring, data in zip(own, memory, strict=True):
                ring.data = data
            self._kinds.append((memory, empty))
            self._starts.append(self._starts[-1] + -(-memory[:, 0].nbytes // ALIGNMENT) * ALIGNMENT)
        self.nbytes = self._starts[-1]
        self._device = device
        self._unused: list[RingSnapshot] = []

    def reset(self, slot: int) -> None:
        """Clear a slot."""
        for memory, empty in self._kinds:
            memory[:, slot] = empty

    def provide(self, count: int) -> None:
        """Allocate memory for this many copies."""
        self._unused += [self._made() for _ in range(count - len(self._unused))]

    def take(self) -> RingSnapshot:
        """Return memory for a copy, with arbitrary content."""
        return self._unused.pop() if self._unused else self._made()

    def give_back(self, copy: RingSnapshot) -> None:
        """Return a copy's memory for reuse."""
        self._unused.append(copy)

    def forget(self) -> None:
        """Free unused memory."""
        self._unused.clear()

    def save(self, slot: int, copy: RingSnapshot) -> None:
        """Copy a slot's ring buffers into `copy`."""
        for (memory, _), part in zip(self._kinds, copy.parts, strict=True):
            part.copy_(memory[:, slot])

    def load(self, slot: int, copy: RingSnapshot) -> None:
        """Copy `copy` into a slot's ring buffers."""
        for (memory, _), part in zip(self._kinds, copy.parts, strict=True):
            memory[:, slot] = part

    def _made(self) -> RingSnapshot:
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        parts = []
        for (memory, _), start in zip(self._kinds, self._starts, strict=False):
            one = memory[:, 0]
            parts.append(flat[start : start + one.nbytes].view(memory.dtype).view(one.shape))
        return RingSnapshot(flat, parts)
