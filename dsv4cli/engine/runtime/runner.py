"""Steps of a model: what every rank does alike with the requests that the leader adds and ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, MAX_SLOTS
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.backend import captures
from dsv4cli.engine.runtime.cache import Cache, Sequence
from dsv4cli.engine.runtime.graphs import GraphRunner
from dsv4cli.engine.runtime.limits import context_of
from dsv4cli.engine.runtime.logprobs import score_rows
from dsv4cli.engine.runtime.prefix_cache import Prefixes
from dsv4cli.engine.runtime.prepare import make_batch
from dsv4cli.engine.runtime.preparing import Preparing
from dsv4cli.engine.runtime.request import Request, RowScores
from dsv4cli.engine.runtime.scheduler import Chunk, Scheduler
from dsv4cli.engine.system.device import step_memory, step_threads
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels.workspace import Workspace

# the most blocks that are made before a token comes: 131,072 tokens, 0.8 GB for Flash
BLOCKS_AT_ONCE = 1024
# the fewest tokens of a sequence that graphs are captured for when a request needs longer ones
FEWEST_TOKENS = 8192


@dataclass(frozen=True)
class Capacity:
    """How much a runner holds. slots: sequences at once. longest: the most tokens of a sequence that steps captured in
    graphs are prepared for, None for no graphs. snapshots: of one sequence, kept for what begins alike; 0: none."""

    slots: int = 1
    longest: int | None = None
    snapshots: int = 0


@dataclass(frozen=True)
class Ran:
    """A step: its chunks, the requests that have caught up, the logits after them fp32 [R, V], scored rows."""

    chunks: list[Chunk]
    ready: list[Request] = field(default_factory=list)
    logits: torch.Tensor | None = None
    scores: dict[Request, RowScores] = field(default_factory=dict)


class Runner:
    """Runs requests through one model; whoever reads the results appends their tokens.

    preparing: says whether the last step took time to compile kernels or to capture a graph. A step that is broken off
    leaves what was kept before it: requests are gone, snapshots stay.
    """

    def __init__(self, model: Transformer, capacity: Capacity, device: torch.device | str) -> None:
        """With snapshots one request runs at a time: a new one takes the place of the one before."""
        self.model = model
        self._weights = sum(parameter.nbytes for parameter in model.parameters())
        self._slots = max(1, min(capacity.slots, MAX_SLOTS))
        self._spare = 2 * capacity.snapshots
        graphs = capacity.longest is not None and captures(torch.device(device))
        self.preparing = Preparing(torch.device(device))
        self.cache = Cache(model.config, model.numerics, slots=self._slots + graphs, device=device)
        self.scheduler = Scheduler(self.cache)
        self.prefixes = Prefixes(self.cache, capacity.snapshots) if capacity.snapshots else None
        self.graphs: GraphRunner | None = None
        self._workspace = Workspace()
        self._torn = False
        if graphs and capacity.longest is not None:
            self.graphs = GraphRunner(model, self.cache, capacity.longest, self._workspace)
            self._provide(capacity.longest)

    def add(self, request: Request) -> None:
        """Queues a request; a prefix cache gives it what it holds of the prompt. Raises NotEnoughMemory."""
        with self._whole():
            self._lengthen(request)
            if self.prefixes is not None:
                self.scheduler.clear()
                self.prefixes.begin(request)
            self.scheduler.add(request)

    def end(self, request: Request) -> bool:
        """Ends a request, whose state only a prefix cache keeps; whether it had not ended before."""
        runs = self.scheduler.remove(request)
        if runs and self.prefixes is None and request.sequence is not None:
            self.cache.free(request.sequence)
            request.sequence = None
        return runs

    def run(self) -> Ran:
        """The next step. Its logits may be overwritten by the one after it. Raises NotEnoughMemory, and UnsoundResult
        for scored rows that are not finite."""
        with self._whole(), step_memory(self.cache.device), self._workspace.current():
            chunks = self.scheduler.chunks()
            with step_threads(sum(chunk.tokens for chunk in chunks), self._weights), self.preparing:
                ran = self._compute(chunks)
            if self.prefixes is not None and any(chunk.end in chunk.request.keep for chunk in chunks):
                self.prefixes.mark()
            return ran

    def forget(self) -> None:
        """Ends every request and gives back what a prefix cache holds."""
        self._repair()
        self.scheduler.clear()
        if self.prefixes is not None:
            self.prefixes.forget()

    def close(self) -> None:
        """Lets go of every request and of the graphs: with several ranks, before they part."""
        self.scheduler.clear()
        if self.graphs is not None:
            self.graphs.forget()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What runs inside changes the cache; where it does not come to its end, `_repair` puts that in order."""
        self._repair()
        self._torn = True
        try:
            yield
        except NotEnoughMemory:
            self.forget()
            raise
        self._torn = False

    def _repair(self) -> None:
        if self._torn:
            self.scheduler.clear()
            snapshots = [] if self.prefixes is None else self.prefixes.recover()
            self.cache.recover([] if self.graphs is None else [self.graphs.padding], snapshots)
            if self.graphs is not None:
                self.graphs.forget()
            self._torn = False

    def _lengthen(self, request: Request) -> None:
        """Graphs are captured anew for each doubling."""
        if self.graphs is not None and request.end > self.graphs.columns * BLOCK_TOKENS:
            doubled = max(FEWEST_TOKENS, 1 << (request.end - 1).bit_length())
            self._provide(min(doubled, context_of(self.model.config, request.limits)))

    def _provide(self, longest: int) -> None:
        assert self.graphs is not None
        self.cache.provide(min(self._slots * -(-longest // BLOCK_TOKENS) + self._spare, BLOCKS_AT_ONCE))
        self.graphs.lengthen(longest)

    @torch.no_grad()
    def _compute(self, chunks: list[Chunk]) -> Ran:
        if self.graphs is not None and all(chunk.tokens == 1 and not chunk.request.scored for chunk in chunks):
            every = self.graphs.logits([(one, ids[0]) for one, ids in _work(chunks)], self.preparing.begin)
            self._advance(chunks)
            ready = [chunk for chunk in chunks if chunk.request.caught_up]
            logits = every if len(ready) == len(chunks) else every[[chunk.last_row for chunk in ready]]
            return Ran(chunks, [chunk.request for chunk in ready], logits if ready else None)
        streams = self.model(make_batch(self.cache, _work(chunks)), self.cache.layers).streams
        self._advance(chunks)
        ready = [chunk for chunk in chunks if chunk.request.caught_up and not chunk.request.scored]
        last = self.model.logits(streams[[chunk.last_row for chunk in ready]]) if ready else None
        scored = [chunk for chunk in chunks if chunk.request.scored]
        scores = score_rows(self.model, scored, streams) if scored else {}
        return Ran(chunks, [chunk.request for chunk in ready], last, scores)

    def _advance(self, chunks: list[Chunk]) -> None:
        for chunk, (sequence, ids) in zip(chunks, _work(chunks), strict=True):
            self.cache.advance(sequence, len(ids))
            chunk.request.done = chunk.end


def _work(chunks: list[Chunk]) -> list[tuple[Sequence, list[int]]]:
    """The sequence of each chunk and its tokens."""
    work = [(chunk.request.sequence, chunk.request.ids[chunk.first : chunk.end]) for chunk in chunks]
    return [(sequence, ids) for sequence, ids in work if sequence is not None]
