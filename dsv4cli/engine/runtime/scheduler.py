"""Which tokens go through the model in a step: sequences join while there are slots, each with its next chunk."""

from collections import deque
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, MAX_SLOTS, MAX_STEP_TOKENS
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.backend import captures
from dsv4cli.engine.runtime.cache import Cache, Sequence, Snapshot
from dsv4cli.engine.runtime.graphs import Decoder
from dsv4cli.engine.runtime.prepare import make_batch
from dsv4cli.engine.runtime.preparing import Preparing
from dsv4cli.engine.system.device import step_threads
from dsv4cli.kernels.workspace import Workspace

# the most blocks that are made before a token comes: 131,072 tokens, 0.8 GB for Flash
BLOCKS_AT_ONCE = 1024


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
    """Runs many streams through one model; a stream's tokens are appended by whoever reads the results.

    preparing: says whether the last call of `logits` took time to compile kernels or to capture a graph.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        streams: int,
        prefill_chunk: int,
        device: torch.device | str,
        longest: int | None = None,
    ) -> None:
        """longest: the most tokens of a stream; where it is given, steps of one token of each are made by a decoder on
        a GPU whose kernels are Triton's."""
        self.model = model
        self.prefill_chunk = prefill_chunk
        self._weights = sum(parameter.nbytes for parameter in model.parameters())
        slots = self._slots = max(1, min(streams, MAX_SLOTS))
        decodes = longest is not None and captures(torch.device(device))
        self.preparing = Preparing(torch.device(device))
        self.cache = Cache(model.config, model.numerics, slots=slots + decodes, device=device)
        self._workspace = Workspace()
        self._decoder: Decoder | None = None
        if longest is not None and decodes:
            self._decoder = Decoder(model, self.cache, longest, self._workspace)
            self.lengthen(longest)
        self._waiting: deque[Stream] = deque()
        self._active: list[Stream] = []

    @property
    def busy(self) -> bool:
        """Whether any stream waits or runs."""
        return bool(self._waiting or self._active)

    def lengthen(self, longest: int, spare: int = 0) -> None:
        """The most tokens of a stream from now on. spare: blocks for snapshots."""
        if self._decoder is not None:
            self.cache.provide(min(self._slots * -(-longest // BLOCK_TOKENS) + spare, BLOCKS_AT_ONCE))
            self._decoder.lengthen(longest)

    def add(self, stream: Stream) -> None:
        """Queues a stream of at least one token, each in the vocabulary; one that has a sequence goes on at once."""
        if stream.sequence is None:
            self._waiting.append(stream)
        else:
            self._active.append(stream)

    def remove(self, stream: Stream) -> None:
        """Takes a stream out and frees its slot."""
        self._active.remove(stream)
        if stream.sequence is not None:
            self.cache.free(stream.sequence)
            stream.sequence = None

    def clear(self) -> None:
        """Takes every stream out; sequences stay with whoever holds their streams."""
        self._waiting.clear()
        self._active.clear()

    def close(self) -> None:
        """Lets go of every stream and of the graphs: with several ranks, before they part."""
        self.clear()
        if self._decoder is not None:
            self._decoder.forget()

    def recover(self, snapshots: Items[Snapshot]) -> None:
        """Starts anew after an interruption: no streams, and of the cache only these snapshots are held."""
        self.clear()
        self.cache.recover([] if self._decoder is None else [self._decoder.nobody], snapshots)
        if self._decoder is not None:
            self._decoder.forget()

    @torch.no_grad()
    def step(self) -> tuple[list[Chunk], torch.Tensor]:
        """Runs the next chunks: what ran, and the streams [T, N, D] after the last layer."""
        chunks = self._next_chunks()
        with self._threads(chunks), self._workspace.current():
            return chunks, self._streams_of(chunks)

    @torch.no_grad()
    def logits(self) -> tuple[list[Stream], torch.Tensor | None]:
        """Runs the next chunks: the streams that have caught up, and the logits after them fp32 [R, V], if any.

        The next call may overwrite them.
        """
        chunks = self._next_chunks()
        with self._threads(chunks), self.preparing, self._workspace.current():
            return self._logits(chunks)

    def _threads(self, chunks: list[Chunk]) -> AbstractContextManager[None]:
        return step_threads(sum(chunk.end - chunk.first for chunk in chunks), self._weights)

    def _logits(self, chunks: list[Chunk]) -> tuple[list[Stream], torch.Tensor | None]:
        logits: torch.Tensor | None
        if self._decoder is not None and all(chunk.end - chunk.first == 1 for chunk in chunks):
            every = self._decoder.logits([(sequence, ids[0]) for sequence, ids in _work(chunks)], self.preparing.begin)
            self._advance(chunks)
            ready = [chunk for chunk in chunks if chunk.stream.caught_up]
            logits = every if len(ready) == len(chunks) else every[[chunk.last_row for chunk in ready]]
        else:
            streams = self._streams_of(chunks)
            ready = [chunk for chunk in chunks if chunk.stream.caught_up]
            logits = self.model.logits(streams[[chunk.last_row for chunk in ready]]) if ready else None
        return [chunk.stream for chunk in ready], logits if ready else None

    def _next_chunks(self) -> list[Chunk]:
        while self._waiting and self.cache.free_slots:
            stream = self._waiting.popleft()
            stream.sequence = self.cache.allocate()
            self._active.append(stream)
        chunks, row = [], 0
        for stream in self._active:
            count = min(len(stream.ids) - stream.done, self.prefill_chunk, MAX_STEP_TOKENS - row)
            if count > 0:
                chunks.append(Chunk(stream, stream.done, stream.done + count, row))
                row += count
        return chunks

    def _streams_of(self, chunks: list[Chunk]) -> torch.Tensor:
        batch = make_batch(self.cache, _work(chunks))
        streams = self.model(batch, self.cache.layers).streams
        self._advance(chunks)
        return streams

    def _advance(self, chunks: list[Chunk]) -> None:
        for chunk, (sequence, ids) in zip(chunks, _work(chunks), strict=True):
            self.cache.advance(sequence, len(ids))
            chunk.stream.done = chunk.end


def _work(chunks: list[Chunk]) -> list[tuple[Sequence, list[int]]]:
    """The sequence of each chunk and its tokens."""
    sequences = [(chunk.stream.sequence, chunk.stream.ids[chunk.first : chunk.end]) for chunk in chunks]
    return [(sequence, ids) for sequence, ids in sequences if sequence is not None]
