"""Which tokens go through the model in a step: sequences join while there are slots, each with its next chunk."""

from collections import deque
from dataclasses import dataclass

import torch

from dsv4cli.engine.batch import make_batch
from dsv4cli.engine.cache import Cache, Sequence
from dsv4cli.engine.model import Transformer

# sequences in flight, and tokens in one step: bounds of the memory that a step takes
MAX_SLOTS = 64
MAX_STEP_TOKENS = 8192


@dataclass(eq=False)
class Stream:
    """A sequence's tokens: `ids` so far, of which the first `done` have gone through the model."""

    number: int
    ids: list[int]
    done: int = 0
    sequence: Sequence | None = None

    @property
    def caught_up(self) -> bool:
        """Whether every token has gone through the model."""
        return self.done == len(self.ids)


@dataclass(frozen=True)
class Chunk:
    """One stream's part of a step: tokens first .. end - 1 of it, in rows row .. row + (end - first) - 1."""

    stream: Stream
    first: int
    end: int
    row: int

    @property
    def last_row(self) -> int:
        """The row of its last token."""
        return self.row + self.end - self.first - 1


class Schedule:
    """Runs many streams through one model; a stream's tokens are appended by whoever reads the results."""

    def __init__(self, model: Transformer, *, streams: int, prefill_chunk: int, device: torch.device | str) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.cache = Cache(model.config, model.numerics, slots=max(1, min(streams, MAX_SLOTS)), device=device)
        self._waiting: deque[Stream] = deque()
        self._active: list[Stream] = []

    @property
    def busy(self) -> bool:
        """Whether any stream waits or runs."""
        return bool(self._waiting or self._active)

    def add(self, stream: Stream) -> None:
        """Queues a stream of at least one token, each in the vocabulary."""
        self._waiting.append(stream)

    def remove(self, stream: Stream) -> None:
        """Takes a stream out and frees its slot."""
        self._active.remove(stream)
        if stream.sequence is not None:
            self.cache.free(stream.sequence)
            stream.sequence = None

    @torch.no_grad()
    def step(self) -> tuple[list[Chunk], torch.Tensor]:
        """Runs the next chunks: what ran, and the streams [T, N, D] after the last layer."""
        while self._waiting and self.cache.free_slots:
            stream = self._waiting.popleft()
            stream.sequence = self.cache.allocate()
            self._active.append(stream)
        chunks = self._next_chunks()
        work = [(chunk.stream.sequence, chunk.stream.ids[chunk.first : chunk.end]) for chunk in chunks]
        batch = make_batch(self.cache, [(sequence, ids) for sequence, ids in work if sequence is not None])
        trunk = self.model(batch, self.cache)
        for chunk, (sequence, ids) in zip(chunks, work, strict=True):
            assert sequence is not None
            self.cache.advance(sequence, len(ids))
            chunk.stream.done = chunk.end
        return chunks, trunk.streams

    def _next_chunks(self) -> list[Chunk]:
        chunks, row = [], 0
        for stream in self._active:
            count = min(len(stream.ids) - stream.done, self.prefill_chunk, MAX_STEP_TOKENS - row)
            if count > 0:
                chunks.append(Chunk(stream, stream.done, stream.done + count, row))
                row += count
        return chunks
