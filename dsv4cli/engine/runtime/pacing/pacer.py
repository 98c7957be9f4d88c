"""Chooses each step's work so that inter-token latency stays near its target while prompts are prefilled.

Decode first: no request waits for its next token longer than a gap that the policy allows. A gap has at most one
prefill chunk, of the size that prefills most tokens per second within the policy; gaps above the goal are balanced by
decode steps without prefill. The tokens of decoding requests ride along in front of the chunk where one row's bits may
depend on others; elsewhere the chunk is a step of its own. Only the leader decides: ranks measure different times.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.runtime.pacing.policy import PacingPolicy
from dsv4cli.engine.runtime.pacing.step_times import StepTimes
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.step import Chunk, StepChoice
from dsv4cli.engine.runtime.step_sizes import (
    CHUNK_ROWS,
    ROWS_PER_SEQUENCE,
    chunk_rows,
    prefill_sequences,
    rows_needed,
    sequences_in,
)


@dataclass(frozen=True)
class PrefillStep:
    """A prefill step that could run next.

    Attributes:
        rows: rows of the step.
        riding: whether decoding requests get their next token in it.
        tokens: prompt tokens that it prefills.
        prompts: how many prompts these are of.
        gap: predicted seconds between two tokens with it.
        late: what 1 in 100 such gaps exceeds, seconds.
    """

    rows: int
    riding: bool
    tokens: int
    prompts: int
    gap: float
    late: float


class Pacer:
    """Decides for one engine what the next step does."""

    def __init__(
        self,
        policy: PacingPolicy,
        captured: Mapping[int, float] | None = None,
        shared_rows: int | None = None,
        sequences: int = prefill_sequences(MAX_SLOTS),
    ) -> None:
        """Args:
        policy: the target and the limits.
        captured: seconds of captured chunks by rows; more may be added later.
        shared_rows: maximum number of rows of a step that requests share without changing each other's bits; None: any.
        sequences: maximum number of sequences of a prefill step.
        """
        self._policy, self._shared_rows, self._sequences = policy, shared_rows, sequences
        self.times = StepTimes(policy, {} if captured is None else captured)
        self._passes: dict[Request, int] = {}
        # the end of the last step that gave tokens, the requests in it, and the rows of the chunk that ran since
        self._ended: float | None = None
        self._decoded: set[int] = set()
        self._chunk_rows = 0
        # seconds by which gaps have exceeded their goals, less those by which others stayed below
        self._debt = 0.0
        self._gaps_since_burst = policy.gaps_per_burst

    def choose(self, active: Sequence[Request]) -> StepChoice | None:
        """Return which requests share the next step; None for all, where none of them decodes."""
        decoding = [request for request in active if request.decodes]
        waiting = self._ordered([request for request in active if not request.decodes])
        if self._decoded.isdisjoint(request.number for request in decoding):
            self._reset()  # nobody waits for a token since then
        if not decoding:
            return self._prefill_only(waiting)
        if not waiting or self._chunk_rows or self._debt > 0 or self._ended is None or not self.times.decode_known:
            return StepChoice()
        step = self._best(
            [step for riding in (False, True) for step in self._steps(waiting, decoding, riding)], len(decoding)
        )
        self._pass_over(waiting)
        riding = [request.number for request in decoding] if step.riding else []
        most = max(sequences_in(step.rows, self._sequences) - len(riding), 1)
        numbers = tuple(request.number for request in waiting[:most])
        # the first prompt may stop early where its state is cached, which leaves rows to others
        return StepChoice(numbers, step.rows, tuple(riding), self._shared_rows or 0)

    def note(self, choice: StepChoice | None, chunks: Sequence[Chunk], prepared: bool) -> None:
        """Learn from a step that has ended.

        Args:
            choice: what `choose` returned for it.
            chunks: what it computed.
            prepared: whether it compiled kernels or captured a graph: its time says nothing about others.
        """
        now = perf_counter()
        if choice is None or prepared:
            self._reset()
            return
        if choice.requests:
            self._passes.update(dict.fromkeys((chunk.request for chunk in chunks), 0))
            if self._ended is None:  # none decoded: the gap before the second tokens begins
                self._begin_gap(now, chunks)
            else:
                self._chunk_rows = rows_needed([chunk.tokens for chunk in chunks])
        if choice.decoding or not choice.requests:
            if self._ended is not None:
                self._learn(now - self._ended, choice, len(choice.decoding or chunks))
            self._begin_gap(now, chunks)

    def _steps(self, waiting: Sequence[Request], decoding: Sequence[Request], riding: bool) -> Iterable[PrefillStep]:
        """Yield a step of each size that these prompts can fill."""
        if riding and (self._shared_rows is not None or len(decoding) >= self._sequences):
            return
        front = [1 + len(request.drafts) for request in decoding] if riding else []
        left = [len(request.ids) - request.done for request in waiting]
        largest = chunk_rows(rows_needed([*front, *left[: self._sequences - len(front)]]))
        for rows in CHUNK_ROWS:
            if rows_needed([*front, 1]) <= rows <= largest:
                counts = self._filled(front, left, rows)
                used, joining = rows_needed([*front, *counts]), len(counts) - (counts[0] < left[0])
                decode = 0.0 if riding else self.times.decode(len(decoding) + joining)
                gap, late = decode + self.times.chunk(used), decode + self.times.late_chunk(used)
                yield PrefillStep(rows, riding, sum(counts), len(counts), gap, late)

    def _filled(self, front: Sequence[int], left: Sequence[int], rows: int) -> list[int]:
        """Return the prompt tokens in a step of `rows` rows: a part of the first prompt, and whole others that fit."""
        counts = [min(left[0], rows - sum(front))]
        shared = rows if self._shared_rows is None else min(rows, self._shared_rows)
        total, sequences = sum(front) + counts[0], len(front) + 1
        for tokens in left[1:]:
            if max(total + tokens, ROWS_PER_SEQUENCE * (sequences + 1)) <= shared and sequences < self._sequences:
                counts.append(tokens)
                total, sequences = total + tokens, sequences + 1
        return counts

    def _best(self, steps: Sequence[PrefillStep], decoding: int) -> PrefillStep:
        """Return the step that prefills most tokens per second within the policy; if none is in time, the shortest."""
        policy, decode, goal = self._policy, self.times.decode(decoding), self.times.goal(decoding)
        fastest = max(step.tokens / self._cost(step, decode) for step in steps)
        efficient = [
            step for step in steps if step.tokens / self._cost(step, decode) >= policy.min_efficiency * fastest
        ]

        def rate(step: PrefillStep) -> float:
            """Return tokens per second, where gaps above the goal are made up for by decode steps without prefill."""
            share = min(1.0, (goal - decode) / self._cost(step, decode))
            return share * step.tokens / (goal if share < 1 else step.gap)

        bursts = self._gaps_since_burst >= policy.gaps_per_burst
        in_time = [
            step
            for step in efficient
            if step.late <= policy.max_gap * goal
            or (bursts and step.prompts > 1 and step.late <= policy.burst_gap * goal)
        ]
        if not in_time:
            return min(efficient, key=lambda step: (step.gap, -step.tokens))
        best = max(in_time, key=rate)
        if best.late > policy.max_gap * goal:
            self._gaps_since_burst = 0
        return best

    @staticmethod
    def _cost(step: PrefillStep, decode: float) -> float:
        """Return the seconds that a gap with this step takes longer than one with a decode step alone."""
        return max(step.gap - decode, step.gap / 100)

    def _prefill_only(self, waiting: Sequence[Request]) -> StepChoice | None:
        """Return which prompts share a step where none decodes: all, or as many as one may hold."""
        left = [len(request.ids) - request.done for request in waiting]
        if self._shared_rows is None:
            count = self._sequences
        else:
            fitting = (n for n in range(2, len(left) + 1) if rows_needed(left[:n]) <= self._shared_rows)
            count = max(fitting, default=1)
        if len(left) <= count:
            return None
        self._pass_over(waiting)
        return StepChoice(tuple(request.number for request in waiting[:count]), rows_needed(left[:count]))

    def _pass_over(self, waiting: Sequence[Request]) -> None:
        """Count a step that not all of these prompts take part in. `note` resets the count of those that do."""
        for request in waiting:
            self._passes[request] = self._passes.get(request, 0) + 1

    def _ordered(self, waiting: Sequence[Request]) -> list[Request]:
        """Return prompts that were passed over too often, then the others, shortest remaining prompt first."""
        for gone in self._passes.keys() - set(waiting):
            del self._passes[gone]
        return sorted(
            waiting,
            key=lambda one: (
                self._passes.get(one, 0) < self._policy.max_passes,
                len(one.ids) - one.done,
                one.number,
            ),
        )

    def _learn(self, seconds: float, choice: StepChoice, decoded: int) -> None:
        """Learn from a gap between two tokens that ends with this step."""
        self._gaps_since_burst += 1
        decode, goal = self.times.decode(decoded), self.times.goal(decoded)
        if not self._chunk_rows:
            expected = decode or seconds
            self.times.learn_decode(decoded, seconds)
        else:
            own = 0.0 if choice.decoding else decode
            expected = own + self.times.chunk(self._chunk_rows)
            self.times.learn_chunk(self._chunk_rows, max(seconds - own, seconds / 10))
        self._debt = max(self._debt + min(seconds, self._policy.max_outlier * expected) - goal, -goal)

    def _begin_gap(self, now: float, chunks: Sequence[Chunk]) -> None:
        self._ended, self._chunk_rows = now, 0
        self._decoded = {chunk.request.number for chunk in chunks}

    def _reset(self) -> None:
        self._ended, self._chunk_rows, self._debt = None, 0, 0.0
