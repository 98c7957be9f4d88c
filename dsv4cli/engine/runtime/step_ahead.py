"""The step that runs before the one before it was read: the GPU does not wait for the host between two tokens.

Its tokens go from one step to the next on the device. Where it turns out that a sequence ends, or goes on with another
token, its row means nothing: the length goes back, as behind drafts that were wrong.
"""

from dataclasses import replace

import torch

from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Scheduler
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.step import Chunk, ComputedStep


class StepAhead:
    """At most one step of a runner; every rank decides alike."""

    def __init__(self, cache: Cache, scheduler: Scheduler, graphs: GraphRunner | None) -> None:
        self._cache, self._scheduler, self._graphs = cache, scheduler, graphs
        self._ran: ComputedStep | None = None

    @property
    def launched(self) -> bool:
        """Whether there is one."""
        return self._ran is not None

    def take(self) -> ComputedStep | None:
        """The step, which is the next one from now on."""
        ran, self._ran = self._ran, None
        return ran

    def follows(self, ran: ComputedStep) -> bool:
        """Whether the step after this one may be launched before this one is read: it decodes the same sequences in a
        step that is captured, at least one of them goes on, and nothing joins, grows or is kept in between."""
        requests = self._scheduler.active
        return (
            self._graphs is not None
            and ran.step is not None
            and self._graphs.prepared(len(requests))
            and [chunk.request for chunk in ran.ready] == requests
            and not self._scheduler.joins
            and any(len(request.ids) + 1 < request.end for request in requests)
            and not any(chunk.end in chunk.request.keep for chunk in ran.chunks)
            and (self._cache.bounded or self._cache.free_blocks >= len(requests))
        )

    def launch(self, ran: ComputedStep, tokens: torch.Tensor) -> None:
        """Launches the step after this one, of the tokens that this one drew: int64 [R], which may be on their way."""
        assert self._graphs is not None
        chunks, work = [], []
        for row, chunk in enumerate(ran.ready):
            assert chunk.request.sequence is not None
            chunks.append(Chunk(chunk.request, chunk.end, chunk.end + 1, row, []))
            work.append((chunk.request.sequence, [0]))
        step = self._graphs.filled(work)
        step.feed(tokens)
        output = step.run()
        for chunk, (sequence, _) in zip(chunks, work, strict=True):
            self._cache.advance(sequence, 1)
            chunk.request.done = chunk.end
        self._ran = ComputedStep(chunks, [*range(len(chunks))], chunks, output.hidden, output.batch, step)

    def take_back(self, request: Request) -> None:
        """Takes a request out of the step, if it is in it: it ends, or its next token is another."""
        ran = self._ran
        if ran is None or request not in [chunk.request for chunk in ran.chunks]:
            return
        assert request.sequence is not None
        self._cache.roll_back(request.sequence, 1)
        request.done -= 1
        kept = [number for number, chunk in enumerate(ran.chunks) if chunk.request is not request]
        chunks, bases = [ran.chunks[number] for number in kept], [ran.bases[number] for number in kept]
        self._ran = replace(ran, chunks=chunks, bases=bases, ready=chunks) if chunks else None

    def forget(self) -> None:
        """There is none any more; what it computes is nobody's."""
        self._ran = None
