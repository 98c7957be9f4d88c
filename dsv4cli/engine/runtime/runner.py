"""Executes steps of a model. Every rank does the same with the requests that the leader adds and ends."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from dsv4cli.engine.config.capacity import MAX_SLOTS, columns_of
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.drafts.draft_steps import DraftSteps
from dsv4cli.engine.runtime.drafts.drafters import drafter_of
from dsv4cli.engine.runtime.graphs.compile_watch import CompileWatch
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.graphs.prefill_graphs import PrefillGraphs
from dsv4cli.engine.runtime.limits import context_of
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.sampling.logprobs import score_rows
from dsv4cli.engine.runtime.scheduler import Scheduler
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.state.capacity import FEWEST_TOKENS, Capacity, prefixes_of
from dsv4cli.engine.runtime.step import Chunk, ComputedStep, StepChoice
from dsv4cli.engine.runtime.step_ahead import StepAhead
from dsv4cli.engine.runtime.step_sizes import prefill_sequences
from dsv4cli.engine.system.backend import captures
from dsv4cli.engine.system.device import step_memory, step_threads, upload
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels.workspace import Workspace

# the most blocks that are made before a token comes: 131,072 tokens, 0.8 GB for Flash
BLOCKS_AT_ONCE = 1024


class Runner:
    """Runs requests through one model. The caller appends the tokens that it samples.

    If a step raises, the requests are gone, and the prefix cache keeps what it had before.

    Attributes:
        preparing: whether the last step compiled kernels or captured a graph.
    """

    def __init__(self, model: Transformer, capacity: Capacity, device: torch.device | str) -> None:
        """Raises NotEnoughMemory, also if the cache memory is too small for any state."""
        self.model = model
        self._weights = sum(parameter.nbytes for parameter in model.parameters())
        self._slots = max(1, min(capacity.slots, MAX_SLOTS))
        self._spare = 2 * capacity.snapshots + 1  # and the padding of graphs
        graphs = capacity.longest is not None and captures(torch.device(device))
        self.preparing = CompileWatch(torch.device(device))
        self.cache = Cache(model.config, model.numerics, slots=self._slots + graphs, device=device)
        drafter = drafter_of(model, self.cache) if capacity.drafts else None
        with step_memory(self.cache.device):
            self.prefixes = prefixes_of(self.cache, capacity, drafter is not None and drafter.reads_next)
        blocks = self.cache.blocks - graphs if self.cache.bounded else None
        self.scheduler = Scheduler(self.cache, self.prefixes, blocks)
        self.graphs: GraphRunner | None = None
        self._torn = False
        self._workspace = Workspace()
        if graphs and capacity.longest is not None:
            self.graphs = GraphRunner(model, self.cache, capacity.longest, self._workspace)
            self._provide(capacity.longest)
        self._chunks = PrefillGraphs(self.graphs) if self.graphs is not None and capacity.chunks else None
        self.ahead = StepAhead(self.cache, self.scheduler, self.graphs)
        self.drafts = None if drafter is None else DraftSteps(drafter, self.graphs, self.cache.device)

    @property
    def chunk_seconds(self) -> dict[int, float]:
        """Seconds of captured prefill chunks, measured at capture, by rows. More sizes may be added later."""
        return {} if self._chunks is None else self._chunks.seconds

    @property
    def prefill_sequences(self) -> int:
        """The maximum number of sequences in a prefill step."""
        return prefill_sequences(self._slots)

    def add(self, request: Request) -> None:
        """Queue a request. If it is admitted at once, it starts from its longest cached prefix. Raises
        NotEnoughMemory.
        """
        with self._whole():
            self._lengthen(request)
            self.scheduler.add(request)

    def admit(self) -> None:
        """Admit queued requests that fit, unless the next step was launched ahead without them. Raises
        NotEnoughMemory.
        """
        if self.scheduler.joins and not self.ahead.launched:
            with self._whole():
                self.scheduler.admit()

    def end(self, request: Request) -> bool:
        """End a request and keep its state in the prefix cache. Return whether it was queued or running.

        Raises NotEnoughMemory.
        """
        with self._whole():
            runs = self.scheduler.remove(request)
            if runs and request.sequence is not None:
                self.ahead.take_back(request)
                # a caught-up request's last step returned no tokens, so its state may be invalid
                if self.prefixes is not None and not request.caught_up:
                    self.prefixes.keep(request)
                self.cache.free(request.sequence)
                request.sequence = None
            return runs

    def run(self, pick: StepChoice | None = None) -> ComputedStep:
        """Run the next step, or return the step that was launched ahead. The step after it may overwrite its logits.

        Args:
            pick: which requests share the step; None for all.

        Raises:
            NotEnoughMemory: the step needs more memory than there is.
            UnsoundResult: logits of a scored row are not finite.
        """
        self.preparing.happened = False
        if (launched := self.ahead.take()) is not None:
            return self._with_logits(launched)
        with self._whole():
            chunks = self.scheduler.chunks(pick)
            with self._computing(sum(chunk.tokens for chunk in chunks)):
                return self._compute(chunks)

    def run_ahead(self, ran: ComputedStep, tokens: torch.Tensor) -> None:
        """Launch the step after `ran`, as `StepAhead.launch` does, and pin host memory while it runs. Raises
        NotEnoughMemory.
        """
        with self._whole(), self._computing(len(tokens)):
            self.ahead.launch(ran, tokens)
            if self.prefixes is not None:
                self.prefixes.prepare_next()

    def prepare(self) -> bool:
        """Prepare one thing that requests may need. Return whether anything was missing. Raises NotEnoughMemory."""
        if self.graphs is None:
            return False
        with self._whole(), self._computing(1):
            graphs = self.graphs.prepare(self._slots) or (self._chunks is not None and self._chunks.prepare())
            return graphs or (self.prefixes is not None and self.prefixes.prepare())

    def speculate(self, ran: ComputedStep, tokens: torch.Tensor, considered: list[int], count: int) -> torch.Tensor:
        """Draft tokens after a step: see `DraftSteps.after`. May be called again with other tokens. Raises
        NotEnoughMemory.
        """
        assert self.drafts is not None
        with self._whole(), self._computing(len(tokens)):
            return self.drafts.after(ran, tokens, considered, count, self.preparing.begin)

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the leader's tokens, int64 [R], on every rank."""
        return self.model.world.broadcast_from_leader(tokens)

    def finish(self, ran: ComputedStep, sampled: list[list[int]]) -> None:
        """Complete a step: append each ready request's tokens and roll back its rejected drafts. Raises
        NotEnoughMemory.

        Args:
            sampled: for each ready chunk at least one token; all but the last are its first draft tokens.
        """
        with self._whole():
            for chunk, tokens in zip(ran.ready, sampled, strict=True):
                request = chunk.request
                assert request.sequence is not None
                self.cache.roll_back(request.sequence, len(chunk.drafts) + 1 - len(tokens))
                request.ids += tokens
                request.done += len(tokens) - 1
            for chunk in ran.chunks:
                if self.prefixes is not None and self.prefixes.kept_at(chunk.request, chunk.end):
                    self.prefixes.keep(chunk.request)

    def forget(self) -> None:
        """End every request and empty the prefix cache."""
        self._repair()
        self.ahead.forget()
        for request in self.scheduler.active:
            if request.sequence is not None:
                self.cache.free(request.sequence)
                request.sequence = None
        self.scheduler.clear()
        if self.prefixes is not None:
            self.prefixes.forget()

    def close(self) -> None:
        """Release requests and graphs. With several ranks, call it before they disconnect."""
        self.ahead.forget()
        self.scheduler.clear()
        self._forget_graphs()

    @contextmanager
    def _computing(self, tokens: int) -> Iterator[None]:
        with torch.inference_mode(), self.threads(tokens), self.preparing, self._workspace.current():
            yield

    def threads(self, tokens: int) -> AbstractContextManager[None]:
        """Return a context with as many CPU threads as a step of this many tokens uses."""
        return step_threads(tokens, self._weights)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Run a block that changes the cache; if it raises, `_repair` restores a consistent cache. Raises
        NotEnoughMemory.
        """
        self._repair()
        self._torn = True
        try:
            with step_memory(self.cache.device):
                yield
        except NotEnoughMemory:
            self.forget()
            raise
        self._torn = False

    def _repair(self) -> None:
        if self._torn:
            self.ahead.forget()
            self.scheduler.clear()
            snapshots = [] if self.prefixes is None else self.prefixes.recover()
            self.cache.recover([] if self.graphs is None else [self.graphs.padding], snapshots)
            self._forget_graphs()
            self._torn = False

    def _forget_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.forget()
        if self._chunks is not None:
            self._chunks.forget()

    def _lengthen(self, request: Request) -> None:
        """Capture graphs for longer sequences. The length doubles, so that this is rare."""
        if self.graphs is not None and columns_of(request.end) > self.graphs.columns:
            doubled = max(FEWEST_TOKENS, 1 << (request.end - 1).bit_length())
            self._provide(min(doubled, context_of(self.model.config, request.limits)))

    def _provide(self, longest: int) -> None:
        assert self.graphs is not None
        self.cache.provide(min(self._slots * columns_of(longest) + self._spare, BLOCKS_AT_ONCE))
        self.graphs.lengthen(longest)

    def _compute(self, chunks: list[Chunk]) -> ComputedStep:
        given = [(chunk.request.sequence, chunk.ids) for chunk in chunks if chunk.request.sequence is not None]
        decodes = all(chunk.end - chunk.first == 1 and not chunk.request.scored for chunk in chunks)
        ran = self._replayed(chunks, given) if self.graphs is not None and decodes else self._computed(chunks, given)
        self._advance(chunks)
        return ran

    def _modelled(self, work: list[tuple[Sequence, list[int]]]) -> tuple[HiddenStates, Batch]:
        """Return the model's output for these tokens, in the first rows."""
        if self._chunks is not None and self._chunks.hold(work):
            return self._chunks.run(work, self.preparing.begin)
        batch = make_batch(self.cache, work)
        return self.model(batch, self.cache.layers), batch

    def _advance(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.request.sequence is not None
            self.cache.advance(chunk.request.sequence, chunk.tokens)
            chunk.request.done = chunk.end

    def _replayed(self, chunks: list[Chunk], work: list[tuple[Sequence, list[int]]]) -> ComputedStep:
        assert self.graphs is not None
        step = self.graphs.filled(work, self.preparing.begin)
        output = step.run()
        bases = list(range(0, len(chunks) * step.rows, step.rows))
        return self._with_logits(ComputedStep(chunks, bases, _ready(chunks), output.hidden, output.batch, step))

    def _with_logits(self, ran: ComputedStep) -> ComputedStep:
        assert ran.step is not None
        [output], rows = ran.step.held, ran.rows()
        if rows == list(range(len(rows))):
            return replace(ran, logits=output.logits[: len(rows)] if rows else None)
        return replace(ran, logits=output.logits[upload(torch.tensor(rows, device="cpu"), self.cache.device)])

    def _computed(self, chunks: list[Chunk], work: list[tuple[Sequence, list[int]]]) -> ComputedStep:
        hidden, batch = self._modelled(work)
        ran = ComputedStep(chunks, [chunk.row for chunk in chunks], _ready(chunks), hidden, batch)
        rows = upload(torch.tensor(ran.rows(), dtype=torch.int64, device="cpu"), self.cache.device)
        logits = self.model.logits(hidden.streams[rows]) if ran.ready else None
        scored = [chunk for chunk in chunks if chunk.request.scored]
        return replace(ran, logits=logits, scores=score_rows(self.model, scored, hidden.streams) if scored else {})


def _ready(chunks: list[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if chunk.end == len(chunk.request.ids) and not chunk.request.scored]
