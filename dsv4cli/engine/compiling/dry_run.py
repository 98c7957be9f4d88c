"""Dry runs of the engine: steps without data and without a GPU show which kernels a demand launches."""

from contextlib import ExitStack

import torch

from dsv4cli.engine.compiling.demand import Demand, Span, Step, decoding, prompts
from dsv4cli.engine.compiling.dry_model import dry_model, placed
from dsv4cli.engine.compiling.launches import Launch, driven_by, recording
from dsv4cli.engine.compiling.no_data import CUDA, NoData
from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.runtime.leader_step import LeaderStep
from dsv4cli.engine.runtime.orders import Orders
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step_sizes import DECODE_BATCHES
from dsv4cli.engine.settings import Limits
from dsv4cli.kernels.card import Card, described
from dsv4cli.kernels.dispatch import use
from dsv4cli.kernels.ggml.kernel.octets import forget_tables

Identities = frozenset[tuple[str, str, str]]
# one step, or all steps of a span of sizes
Task = Step | Span


class DryRun:
    """Dry-runs the steps of a demand for a card, in this process and thread until it is closed.

    Raises NotEnoughMemory.
    """

    def __init__(self, demand: Demand, card: Card) -> None:
        self._demand, division = placed(demand)
        with ExitStack() as stack:
            for inside in (use("triton"), described(card), driven_by(card), NoData(), torch.inference_mode()):
                stack.enter_context(inside)
            self._recorder = stack.enter_context(recording())
            self._model = dry_model(self._demand, division, CUDA)
            self._inside = stack.pop_all()

    def __enter__(self) -> "DryRun":
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.close()
        forget_tables()  # those of this run have no data

    def tasks(self) -> list[Task]:
        """Return all steps and spans that the demand may cause."""
        return [*prompts(self._demand), *decoding(self._demand, DECODE_BATCHES)]

    def launches(self, task: Task) -> list[Launch]:
        """Return the launches of a task that no earlier task had."""
        before = set(self._recorder.launches)
        if isinstance(task, Step):
            self._step(task)
        else:
            self._explore(task)
        return [launch for identity, launch in self._recorder.launches.items() if identity not in before]

    def _explore(self, span: Span) -> None:
        """Bisect a span until both ends of each part launch the same kernels."""
        known: dict[int, Identities] = {}

        def at(number: int) -> Identities:
            if number not in known:
                known[number] = self._step(span.step(number))
            return known[number]

        parts = [(span.first, span.last)]
        while parts:
            first, last = parts.pop()
            if at(first) != at(last) and last - first > 1:
                middle = (first + last) // 2
                parts += [(middle, last), (first, middle)]

    def _step(self, step: Step) -> Identities:
        """Run one step in a fresh engine and return what it launches."""
        demand, recorder = self._demand, self._recorder
        recorder.seen.clear()
        capacity = Capacity(len(step.chunks), step.longest, 0, demand.drafts > 0)
        runner = Runner(self._model, capacity, CUDA)
        for tokens, place in step.chunks:
            runner.scheduler.add(self._request(runner, tokens, place, step))
        if step.longest is None:
            runner.run()
        else:
            LeaderStep(runner, Orders(None)).step(step.count, ahead=False)
        return frozenset(recorder.seen)

    def _request(self, runner: Runner, tokens: int, place: int, step: Step) -> Request:
        """Return a request with `place` tokens already processed."""
        demand, end = self._demand, place + tokens
        limits = Limits(prefill_chunk=demand.chunk, max_context=demand.context)
        request = Request([0] * end, step.sampling, limits, stop_ids=(), done=place)
        request.scored = step.longest is None
        request.end, request.drafts = end + 2 * ROLLBACK, [0] * step.drafts
        request.sequence = runner.cache.allocate()
        runner.cache.reserve(request.sequence, place)
        runner.cache.advance(request.sequence, place)
        return request
