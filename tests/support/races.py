"""Finds races on shared memory in kernels that run in the Gluon interpreter, in whichever order their threads ran.

Each set of warps, and the copies of each barrier, has a clock, and knows the others' clocks as of when they last met at
a barrier (vector clocks: Flanagan and Freund, FastTrack, 2009). Memory remembers when it was last written and read. It
is a race if an access does not know of the last write, or if a write does not know of the reads before it.
"""

import threading

import torch

# most actors of a program: threads and barriers
MOST = 128
# bytes of shared memory that are remembered together, if rows are multiples of them
TOGETHER = 16


class Actor:
    """A set of warps, or the copies that a barrier counts: its number, and what it knows of all clocks."""

    def __init__(self, number: int, known: torch.Tensor | None = None) -> None:
        assert number < MOST
        self.number = number
        self.known = torch.zeros(MOST, dtype=torch.int32, device="cpu") if known is None else known.clone()
        self.known[number] = 1

    def learn(self, known: torch.Tensor) -> None:
        self.known = torch.maximum(self.known, known)

    def tick(self) -> None:
        """Advance the actor's own clock: the others do not know yet of what follows."""
        self.known[self.number] += 1


class Memory:
    """Who last wrote and read each part of an allocation, and when."""

    def __init__(self, values: torch.Tensor) -> None:
        row = values.shape[-1] * values.element_size()
        self.each = TOGETHER if row % TOGETHER == 0 else values.element_size()
        self.lock, self.size = threading.Lock(), values.nbytes // self.each
        self.writer, self.written = self._new(), self._new()
        self.read_at: dict[int, torch.Tensor] = {}

    def read(self, values: torch.Tensor, actor: Actor) -> None:
        """Remember that an actor reads a view of the memory. Fails if that is a race."""
        with self.lock:
            assert self._is_written(values, actor), "a race: read while a write may not have ended"
            self._viewed(self.read_at.setdefault(actor.number, self._new()), values).fill_(actor.known[actor.number])

    def write(self, values: torch.Tensor, actor: Actor, by: Actor) -> None:
        """Remember that an actor writes a view of the memory, `by` itself or copies. Fails if that is a race."""
        with self.lock:
            assert self._is_written(values, actor), "a race: written while another write may not have ended"
            for number, when in self.read_at.items():
                assert (self._viewed(when, values) <= actor.known[number]).all(), "a race: written while it may be read"
            self._viewed(self.writer, values).fill_(by.number)
            self._viewed(self.written, values).fill_(by.known[by.number])

    def _is_written(self, values: torch.Tensor, actor: Actor) -> bool:
        known = actor.known[self._viewed(self.writer, values)]
        return bool((self._viewed(self.written, values) <= known).all())

    def _new(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.int32, device="cpu")

    def _viewed(self, states: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return what is remembered of a view, whose rows are whole parts."""
        size, shape, strides = values.element_size(), [], []
        for length, stride in zip(values.shape, values.stride(), strict=True):
            parts, rest = divmod((length if stride == 1 else stride) * size, self.each)
            assert rest == 0 or length == 1
            shape.append(max(parts, 1) if stride == 1 else length)
            strides.append(1 if stride == 1 else parts)
        begin, rest = divmod(values.storage_offset() * size, self.each)
        assert rest == 0
        return states.as_strided(shape, strides, begin)
