"""Launches a decode step before the step before it has been read, so that the GPU never waits for the host.

Tokens go from one step to the next on the device. If a sequence turns out to have ended, or continues with another
token, its row is discarded and its length rolled back, as for rejected draft tokens.
"""

from dataclasses import replace

import torch

from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.scheduler import Scheduler
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.step import Chunk, ComputedStep


class StepAhead:
    """The step of a runner that was launched ahead, if any. Every rank decides alike."""

    def __init__(self, cache: Cache, scheduler: Scheduler, graphs: GraphRunner | None) -> None:
        self._cache, self._scheduler, self._graphs = cache, scheduler, graphs
        self._ran: ComputedStep | None = None

    @property
    def launched(self) -> bool:
        """Whether a step was launched ahead."""
        return self._ran is not None

    def take(self) -> ComputedStep | None:
        """Return the launched step, which becomes the current one; None if there is none."""
        ran, self._ran = self._ran, None
        return ran

    def follows(self, ran: ComputedStep) -> bool:
        """Return whether the step after `ran` may be launched before `ran` is read.

        It may if it decodes the same sequences in a captured step, at least one of them continues, and in between no
        request
        joins, no graph must grow and no state is cached.
        """
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
        """Launch the step after `ran`. tokens: int64 [R], sampled from `ran`; they may still be on their way."""
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
        """Remove a request from the launched step, because it has ended or continues with another token."""
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
        """Discard the launched step."""
        self._ran = None
