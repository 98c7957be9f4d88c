"""Copies of what a slot's rings hold, each in one piece of memory, which is used again."""

from collections.abc import Sequence

import torch

from dsv4cli.engine.model.state import Ring

# where each ring begins in a copy: bytes that any dtype may begin at
ALIGNMENT = 16


class RingCopy:
    """The rings of one slot: uint8 [n], and each ring's part of it."""

    def __init__(self, flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self.flat, self.parts = flat, parts


class RingCopies:
    """Copies of the rings of one cache. nbytes: of one copy."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._rings = rings
        self._starts = [0]
        for ring in rings:
            size = ring.data[0].nbytes
            self._starts.append(self._starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        self.nbytes = self._starts[-1]
        self._unused: list[RingCopy] = []

    def provide(self, count: int) -> None:
        """Has memory for so many copies."""
        self._unused += [self._made() for _ in range(count - len(self._unused))]

    def take(self) -> RingCopy:
        """Memory for a copy, which holds anything."""
        return self._unused.pop() if self._unused else self._made()

    def give_back(self, copy: RingCopy) -> None:
        """The copy is used no more."""
        self._unused.append(copy)

    def forget(self) -> None:
        """Lets go of memory that is not used."""
        self._unused.clear()

    def save(self, slot: int, copy: RingCopy) -> None:
        """What the slot holds, into the copy."""
        torch._foreach_copy_(copy.parts, self._of(slot))

    def load(self, slot: int, copy: RingCopy) -> None:
        """What the copy holds, into the slot."""
        torch._foreach_copy_(self._of(slot), copy.parts)

    def _of(self, slot: int) -> list[torch.Tensor]:
        return [ring.data[slot] for ring in self._rings]

    def _made(self) -> RingCopy:
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=self._rings[0].data.device)
        parts = []
        for ring, start in zip(self._rings, self._starts, strict=False):
            one = ring.data[0]
            parts.append(flat[start : start + one.nbytes].view(one.dtype).view(one.shape))
        return RingCopy(flat, parts)
