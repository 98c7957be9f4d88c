"""The loop that every caller runs: add requests, then call `step` until they finish."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import TracebackType

import torch

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import lost_others
from dsv4cli.engine.runtime.drafts.draft_plan import DraftPlan
from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.graphs.compile_watch import OnPreparing
from dsv4cli.engine.runtime.leader_step import LeaderStep
from dsv4cli.engine.runtime.limits import check_cache_limit, end_of
from dsv4cli.engine.runtime.orders import Followers, Orders, described
from dsv4cli.engine.runtime.pacing.pacer import Pacer
from dsv4cli.engine.runtime.pacing.policy import PacingPolicy
from dsv4cli.engine.runtime.request import Request, Result, Token
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step import ComputedStep, StepChoice
from dsv4cli.engine.runtime.usage import Usage, usage_of
from dsv4cli.engine.settings import Drafting
from dsv4cli.errors import NotEnoughMemory
from dsv4cli.kernels.rows import ROWS_ALIKE, ROWS_EXACT


class Engine:
    """Runs requests on one model. With tensor parallelism this is the leader, and the other ranks follow.

    Other requests affect the tokens of a request only through rounding, in steps of more than ROWS_ALIKE rows, or on a
    GPU of more than ROWS_EXACT rows, or without `exact`. Not thread-safe.
    """

    def __init__(
        self,
        model: Transformer,
        capacity: Capacity,
        device: torch.device | str,
        followers: Followers | None = None,
        drafting: Drafting = Drafting(),  # noqa: B008 - frozen
        step_ms: float | None = None,
    ) -> None:
        """Args:
            drafting: how many draft tokens a step verifies, if the model has a drafter.
            step_ms: the target for the mean inter-token latency while prompts are prefilled, ms; None for no target.

        Raises NotEnoughMemory.
        """
        self.model = model
        self.followers = followers
        drafts = drafting.most != 0 and model.config.drafter != "none"
        capacity = replace(capacity, drafts=drafts, chunks=step_ms is not None)
        self.runner = Runner(model, capacity, device)
        # up to this many rows, each row has the same bits as alone; a GPU without `exact` guarantees nothing
        on_gpu, exact = self.runner.cache.device.type == "cuda", ROWS_EXACT if model.numerics.exact else None
        shared = exact if on_gpu else ROWS_ALIKE
        self._orders = Orders(followers)
        self._orders.add("begin", **asdict(capacity))
        drafter = None if self.runner.drafts is None else self.runner.drafts.drafter
        self._plan = None if drafter is None else DraftPlan(drafter, drafting, shared or MAX_SLOTS)
        self._drawing = LeaderStep(self.runner, self._orders)
        seconds, most = self.runner.chunk_seconds, self.runner.prefill_sequences
        self._pacer = None if step_ms is None else Pacer(PacingPolicy(step_ms / 1e3), seconds, shared, most)
        self._count = 0

    @classmethod
    def of(
        cls,
        model: Transformer,
        requests: list[Request],
        device: torch.device | str,
        followers: Followers | None = None,
        drafting: Drafting = Drafting(),  # noqa: B008 - frozen
    ) -> "Engine":
        """Return an engine with these requests added.

        Raises UsageError as `add` does, before memory is allocated; the message names the prompt by its number if there
        are
        several.
        """
        for number, one in enumerate(requests if len(requests) > 1 else ()):
            one.name = f"{'text' if one.scored else 'prompt'} {number}"
        for one in requests:
            one.end = end_of(one, model.config)
        longest = None if any(one.scored for one in requests) else max((one.end for one in requests), default=1)
        engine = cls(model, Capacity(len(requests), longest), device, followers, drafting)
        for one in requests:
            engine._queue(one)
        return engine

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error a step may still run, and freeing graphs would wait for it
            self.runner.close()

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return self.runner.scheduler.busy

    def report_preparing(self, on_preparing: OnPreparing) -> None:
        """Call `on_preparing(True)` when a step starts to compile kernels or capture graphs, and with False after
        that step.
        """
        self.runner.preparing.on_preparing = on_preparing

    @property
    def compiled(self) -> int:
        """The number of kernels compiled during steps so far, because Triton's cache did not have them."""
        return self.runner.preparing.compiled

    @property
    def preparing(self) -> bool:
        """Whether the current step is compiling kernels or capturing graphs. Thread-safe."""
        return self.runner.preparing.under_way

    @property
    def unpinned(self) -> NotEnoughMemory | None:
        """Why the prefix cache's host memory is not pinned; None if it is."""
        return None if self.runner.prefixes is None else self.runner.prefixes.unpinned

    @property
    def max_request_tokens(self) -> int | None:
        """The largest number of tokens, prompt and completion, that fits the KV cache; None if it is not bounded."""
        return self.runner.scheduler.max_request_tokens

    @property
    def usage(self) -> Usage:
        """Counts of requests, cache blocks and states in the prefix cache."""
        return usage_of(self.runner)

    def add(self, request: Request) -> None:
        """Queue a request. It starts when its prompt and its longest completion fit into the cache.

        Raises:
            UsageError: the prompt is empty, longer than the context or the cache, or has token ids outside the
                vocabulary.
            NotEnoughMemory: the state that the request starts from cannot be restored.
        """
        request.end = end_of(request, self.model.config)
        check_cache_limit(request, self.max_request_tokens)
        self._queue(request)

    def cancel(self, request: Request) -> None:
        """End a request before its next step. Does nothing if it has ended."""
        if self.runner.end(request):
            self._orders.add("end", number=request.number)
            self._rest()

    def draft_report(self) -> DraftReport | None:
        """Return statistics of draft tokens so far; None if no drafter is used."""
        return None if self._plan is None else self._plan.report

    def step(self) -> list[Result]:
        """Run one step and return what each of its requests got. A token with `finish` is a request's last.

        After an error no request continues.

        Raises:
            UnsoundResult: logits are not finite.
            NotEnoughMemory: the step needs more memory than there is.
            RankLost: another rank has ended.
        """
        scheduler = self.runner.scheduler
        with self._resting_on_error():
            self.runner.admit()  # first, so that the choice is among all that the step may have
        pick = self._pick()
        requests = scheduler.of(pick)
        own = requests[: len(pick.decoding) or None] if pick else requests  # without prompts after the decoding ones
        count = 0 if self._plan is None else self._plan.begin(own, scheduler.active)
        drafted = [[one.number, one.drafts] for one in requests if one.drafts]
        # a drafter may have to follow a step once more, which is gone when the next one runs
        ahead = not (count or drafted) and (self._plan is None or not any(one.constraint for one in requests))
        self._orders.add("step", drafts=drafted, count=count, ahead=ahead, pick=None if pick is None else asdict(pick))
        with self._resting_on_error():
            self._orders.send_orders()
            ran, tokens, drafts = self._drawing.step(count, ahead, pick)
            self._orders.add("finish", sampled=[[token.id for token in own] for own in tokens])
            if self._plan is not None:
                self._plan.take(ran.ready, tokens, drafts)
                if ran.ready and not self.runner.preparing.happened:  # otherwise nothing waited for the device
                    self._plan.time(ran.chunks, count, self._drawing.watch.seconds())
            if self._pacer is not None:
                self._pacer.note(pick, ran.chunks, self.runner.preparing.happened)
            return self._results(ran, dict(zip((chunk.request for chunk in ran.ready), tokens, strict=True)))

    def prepare(self) -> bool:
        """Prepare one thing that requests may need, such as a captured graph. Return whether anything was missing.

        Raises NotEnoughMemory.
        """
        self._orders.add("prepare")
        with self._resting_on_error():
            self._orders.send_orders()
            prepared = self.runner.prepare()
        self._rest()
        return prepared

    def forget(self) -> None:
        """End every request and empty the prefix cache."""
        self._orders.add("forget")
        self.runner.forget()
        self._rest()

    def _pick(self) -> StepChoice | None:
        """Return which requests share the next step. A step that is already running belongs to those that decode."""
        if self._pacer is None:
            return None
        return StepChoice() if self.runner.ahead.launched else self._pacer.choose(self.runner.scheduler.active)

    def _queue(self, request: Request) -> None:
        request.number, request.default_chunk = self._count, self.model.prefill_chunk
        self._count += 1
        self._orders.add("add", **described(request))
        self.runner.add(request)

    @contextmanager
    def _resting_on_error(self) -> Iterator[None]:
        """Mark the followers as idle if the block raises: one that exits later must not end this process."""
        try:
            yield
        except Exception as error:
            self._orders.lost = lost_others(error)
            self._orders.rest()
            raise

    def _rest(self) -> None:
        if not self.busy:
            self._orders.rest()

    def _results(self, ran: ComputedStep, sampled: dict[Request, list[Token]]) -> list[Result]:
        results = []
        for chunk in ran.chunks:
            request, tokens = chunk.request, sampled.get(chunk.request, [])
            if (request.scored and request.caught_up) or (tokens and tokens[-1].finish):
                self.cancel(request)
            results.append(Result(request, tokens, ran.scores.get(request)))
        return results
