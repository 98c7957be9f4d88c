"""Times speculative decoding: the cost of each verified row and of the drafter, and the break-even acceptance."""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from dsv4cli.engine.config.capacity import MAX_SLOTS, ROLLBACK
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.profiling.clock import Call, Timing, wait
from dsv4cli.engine.profiling.compiling import nothing_compiles
from dsv4cli.engine.profiling.launches import Launches, trace_step
from dsv4cli.engine.profiling.step import FEWEST, LESS, MOST, SECONDS, WARM, StepShape, fill
from dsv4cli.engine.runtime.drafts.drafters import default_drafts, most_drafts
from dsv4cli.engine.runtime.drafts.stopwatch import Stopwatch
from dsv4cli.engine.runtime.leader_step import sampled
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.sampling.logit_masks import RequestTables
from dsv4cli.engine.runtime.sampling.sampler import check_finite
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step import ComputedStep
from dsv4cli.engine.runtime.step_sizes import batch_size
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.system.device import step_memory
from dsv4cli.errors import UsageError
from dsv4cli.kernels.dispatch import Backend, use


@dataclass(frozen=True)
class DraftLoad:
    """How many tokens to draft, and which acceptance to report.

    Attributes:
        drafts: draft tokens per sequence in a step.
        accept: tokens per sequence that a step yields; None to report every whole number that is possible.
    """

    drafts: int
    accept: float | None = None

    @property
    def accepted(self) -> list[float]:
        """The tokens per step to report times for."""
        return [float(length) for length in range(1, self.drafts + 2)] if self.accept is None else [self.accept]


@dataclass(frozen=True)
class VerifiedRows:
    """Times of a step that verifies drafts.

    Attributes:
        rows: tokens of each sequence in the step.
        computed: rows of each sequence that a captured step computes.
        seconds: time of the model.
        sampling: time to sample a token at each row.
        launches: launches of the model; None on a CPU.
    """

    rows: int
    computed: int
    seconds: Timing
    sampling: Timing
    launches: Launches | None

    @property
    def total(self) -> float:
        """Seconds of the model and of sampling."""
        return self.seconds.median + self.sampling.median

    def record(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "name": f"verify {self.rows} row{'s' if self.rows > 1 else ''}",
            "rows": self.rows,
            "computed": self.computed,
            "seconds": self.seconds.record(),
            "sampling": self.sampling.record(),
            "launches": _launched(self.launches),
        }


@dataclass(frozen=True)
class DraftProfile:
    """Times of steps with 1, 2, … `load.drafts` + 1 rows. The last one is followed by the drafter.

    Attributes:
        drafting: time of the drafter.
        launches: launches of the drafter; None on a CPU.
    """

    drafter: str
    load: DraftLoad
    sequences: int
    sampling: Sampling
    rows: list[VerifiedRows]
    drafting: Timing
    launches: Launches | None

    def record(self) -> dict[str, Any]:
        """Return a JSON object."""
        drafts, without = self.load.drafts, self.rows[0].total
        seconds = self.rows[-1].total + self.drafting.median
        return {
            "drafter": self.drafter,
            "drafts": drafts,
            "accept": self.load.accept,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "rows": [one.record() for one in self.rows],
            "drafting": {
                "name": f"draft {drafts} token{'s' if drafts > 1 else ''}",
                "seconds": self.drafting.record(),
                "share": self.drafting.median / seconds,
                "launches": _launched(self.launches),
            },
            "step_seconds": seconds,
            "without": self._token(without, 1.0),
            "seconds_per_token": [{"accepted": one, **self._token(seconds, one)} for one in self.load.accepted],
            "break_even": seconds / without,
        }

    def _token(self, seconds: float, accepted: float) -> dict[str, float]:
        """Return the time per token for steps of `seconds` that yield `accepted` tokens per sequence."""
        each = seconds / accepted
        return {"seconds": each, "tokens_per_second": self.sequences / each, "speedup": self.rows[0].total / each}


def _launched(launches: Launches | None) -> dict[str, Any] | None:
    return None if launches is None else {"count": launches.count, "busy_seconds": launches.busy}


def choose_drafts(config: ModelConfig, load: StepShape, drafting: Drafting, accept: float | None) -> DraftLoad | None:
    """Return what --draft and --accept request; None for no drafts.

    Args:
        drafting: without a number of drafts, the default of the model's drafter is used. With one, the model must have
            a drafter.

    Raises UsageError if the drafter, the size of a step or other options do not allow it.
    """
    drafts = default_drafts(config) if drafting.most is None else drafting.most
    if not drafts:
        if accept is not None:
            raise UsageError(f"--accept {accept:g} requires drafts, but none are generated", "add --draft 3")
        return None
    if load.tokens > 1:
        raise UsageError(
            f"--draft {drafts} requires decoding, but --tokens {load.tokens} is a prompt chunk", "remove --tokens"
        )
    most = most_drafts(config)
    if drafts > most:
        raise UsageError(
            f"--draft {drafts}: the model's drafter makes at most {most} draft tokens per step", f"use --draft {most}"
        )
    _check_fits(config, load, drafts)
    if accept is not None and not 1 <= accept <= drafts + 1:
        raise UsageError(
            f"--accept {accept:g} is impossible: a step with --draft {drafts} yields 1 to {drafts + 1} tokens",
            f"use a number from 1 to {drafts + 1}: accepted draft tokens plus one that the model samples itself",
        )
    return DraftLoad(drafts, accept)


def _check_fits(config: ModelConfig, load: StepShape, drafts: int) -> None:
    sequences, rows = batch_size(load.batch), drafts + 1
    if sequences * rows > MAX_SLOTS:
        fewer, batch = MAX_SLOTS // sequences - 1, 1 << (MAX_SLOTS // rows).bit_length() - 1
        counted = "" if sequences == load.batch else f" ({load.batch} sequences are padded to {sequences})"
        raise UsageError(
            f"--batch {load.batch} and --draft {drafts} are {sequences} x {rows} rows{counted}, but a step with drafts "
            f"has at most {MAX_SLOTS}",
            f"use --batch {batch}" + (f" or --draft {fewer}" if fewer else ""),
        )
    most = config.max_position_embeddings - 2 * ROLLBACK
    if load.context > most:
        raise UsageError(
            f"--context {load.context} leaves no space for draft tokens below the model's context limit",
            f"use at most --context {most}",
        )


@torch.inference_mode()
def profile_drafts(
    model: Transformer,
    load: StepShape,
    drafts: DraftLoad,
    sampling: Sampling,
    device: torch.device,
    backend: Backend = "auto",
) -> DraftProfile:
    """Time steps of 1 to `drafts` + 1 rows per sequence, run as the engine runs them.

    The state before the steps is random, and so are the tokens. Rows share fewer experts than those of real text.

    Raises:
        UnsoundResult: logits or draft probabilities are not finite, or a kernel was compiled during timing.
        NotEnoughMemory: a step needs more memory than there is.
    """
    with use(backend):
        with step_memory(device, LESS):
            steps = _Steps(model, load, drafts.drafts, sampling, device)
        rows, drafting, launches = steps.measured()
        return DraftProfile(steps.drafter, drafts, load.batch, sampling, rows, drafting, launches)


class _Steps:
    """Repeatable steps at fixed positions: each run is rolled back."""

    def __init__(
        self, model: Transformer, load: StepShape, drafts: int, sampling: Sampling, device: torch.device
    ) -> None:
        self._device, self._drafts = device, drafts
        self._runner = Runner(model, Capacity(load.batch, load.context + 1, drafts=True), device)
        self._watch, self._tables = Stopwatch(device), RequestTables.on(device)
        assert self._runner.drafts is not None
        self.drafter = self._runner.drafts.drafter.name
        cache, generator = self._runner.cache, torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (load.batch, 1 + drafts), generator=generator, device="cpu")
        self._work: list[tuple[Request, list[int]]] = []
        for newest, *further in ids.tolist():
            request = Request([*[0] * load.context, newest], sampling, Limits())
            request.sequence, request.done = cache.allocate(), load.context
            cache.reserve(request.sequence, load.context + ROLLBACK)
            cache.advance(request.sequence, load.context)
            self._runner.add(request)
            self._work.append((request, further))
        if load.context:
            fill(cache)

    def measured(self) -> tuple[list[VerifiedRows], Timing, Launches | None]:
        """Time steps of 1, 2, … rows per sequence up to the maximum. The last step is followed by drafting.

        Returns the steps' times, the drafter's time and the drafter's launches.
        """
        most = self._drafts + 1
        steps: list[Call] = [partial(self._verify, count) for count in range(1, most)]
        *times, (seconds, sampling, drafting) = self._time([*steps, lambda: self._draft(*self._verify(most))])
        rows = [self._described(count, *own) for count, own in enumerate([*times, [seconds, sampling]], 1)]
        ran, tokens = self._verify(most)
        check_finite(self._draft(ran, tokens))
        return rows, drafting, self._launches(lambda: self._draft(ran, tokens))

    def _described(self, rows: int, seconds: Timing, sampling: Timing) -> VerifiedRows:
        ran, _ = self._verify(rows)
        assert ran.logits is not None
        check_finite(ran.logits)
        return VerifiedRows(rows, ran.step.rows if ran.step else rows, seconds, sampling, self._launches(self._run))

    def _verify(self, rows: int) -> tuple[ComputedStep, torch.Tensor]:
        """Run a step of this many rows per sequence. Return it and the sampled tokens, int64 [R]."""
        for request, further in self._work:
            request.drafts = further[: rows - 1]
        self._watch.start()
        ran = self._run()
        self._watch.mark()
        assert ran.logits is not None
        tokens = sampled(ran, ran.logits, self._tables)
        self._watch.mark()
        return ran, tokens

    def _run(self) -> ComputedStep:
        """Run the model and roll the sequences back."""
        ran = self._runner.run()
        for chunk in ran.chunks:
            assert chunk.request.sequence is not None
            self._runner.cache.roll_back(chunk.request.sequence, chunk.tokens)
            chunk.request.done = chunk.first
        return ran

    def _draft(self, ran: ComputedStep, tokens: torch.Tensor) -> torch.Tensor:
        """Return the draft tokens and their probabilities, as `speculate` does."""
        made = self._runner.speculate(ran, tokens, [len(chunk.drafts) for chunk in ran.ready], self._drafts)
        self._watch.mark()
        return made

    def _time(self, steps: list[Call]) -> list[list[Timing]]:
        """Time the parts between the marks of each step.

        Steps alternate, so that a slowdown of the machine affects all.
        """
        runs: list[list[list[float]]] = [[] for _ in steps]
        for step in steps:
            for _ in range(WARM):
                step()
        with nothing_compiles():
            while len(runs[0]) < FEWEST or (sum(chain(*chain(*runs))) < SECONDS * len(runs) and len(runs[0]) < MOST):
                for step, own in zip(steps, runs, strict=True):
                    wait(self._device)
                    step()
                    wait(self._device)
                    own.append(self._watch.seconds())
        on_gpu = self._device.type == "cuda"
        return [[Timing.of(part, "events" if on_gpu else "host") for part in zip(*own, strict=True)] for own in runs]

    def _launches(self, part: Call) -> Launches | None:
        return trace_step(part, self._device, None) if self._device.type == "cuda" else None
