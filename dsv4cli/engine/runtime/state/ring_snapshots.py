"""The memory of a cache's rings, and copies of what a slot's rings hold, each in one piece, which is used again.

Rings of one kind lie in one piece too, so that a slot is copied with a few launches: Flash has 167 rings of 7 kinds.
"""

from collections.abc import Sequence

import torch

from dsv4cli.engine.model.state import Ring

# where the rings of a kind begin in a copy: bytes that any dtype may begin at
ALIGNMENT = 16


class RingSnapshot:
    """The rings of one slot: uint8 [n], and the part of each kind [rings, capacity, D]."""

    def __init__(self, flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.flat, self.parts = flat, parts


class RingSnapshots:
    """The rings of one cache and copies of them. nbytes: of one copy."""

    def __init__(self, rings: Sequence[Ring], device: torch.device) -> None:
        """rings: without memory, which they get here."""
        kinds: dict[tuple[torch.Size, torch.dtype, float], list[Ring]] = {}
        for ring in rings:
            kinds.setdefault((ring.data.shape, ring.data.dtype, ring.empty), []).append(ring)
        # of each kind [rings, slots, capacity, D] and the value of rows never written
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
        """Forgets what the slot holds."""
        for memory, empty in self._kinds:
            memory[:, slot] = empty

    def provide(self, count: int) -> None:
        """Has memory for so many copies."""
        self._unused += [self._made() for _ in range(count - len(self._unused))]

    def take(self) -> RingSnapshot:
        """Memory for a copy, which holds anything."""
        return self._unused.pop() if self._unused else self._made()

    def give_back(self, copy: RingSnapshot) -> None:
        """The copy is used no more."""
        self._unused.append(copy)

    def forget(self) -> None:
        """Lets go of memory that is not used."""
        self._unused.clear()

    def save(self, slot: int, copy: RingSnapshot) -> None:
        """What the slot holds, into the copy."""
        for (memory, _), part in zip(self._kinds, copy.parts, strict=True):
            part.copy_(memory[:, slot])

    def load(self, slot: int, copy: RingSnapshot) -> None:
        """What the copy holds, into the slot."""
        for (memory, _), part in zip(self._kinds, copy.parts, strict=True):
            memory[:, slot] = part

    def _made(self) -> RingSnapshot:
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        parts = []
        for (memory, _), start in zip(self._kinds, self._starts, strict=False):
            one = memory[:, 0]
            parts.append(flat[start : start + one.nbytes].view(memory.dtype).view(one.shape))
        return RingSnapshot(flat, parts)
