"""The drafter's part of each step, run directly or as a CUDA graph after a captured step."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from dsv4cli.engine.runtime.drafts.drafters import Drafter
from dsv4cli.engine.runtime.drafts.speculate import Verified, speculate
from dsv4cli.engine.runtime.graphs.decode_graphs import CapturedStep, GraphRunner
from dsv4cli.engine.runtime.sampling.sampler import Draws, Kind, kind_of, packed
from dsv4cli.engine.runtime.step import Chunk, ComputedStep
from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.system.device import upload


class DraftSteps:
    """Runs the drafter after each step."""

    def __init__(self, drafter: Drafter, graphs: GraphRunner | None, device: torch.device) -> None:
        self.drafter = drafter
        self._graphs, self._device = graphs, device
        # captured drafter steps of each captured step, by number of drafts and kind of sampling
        self._steps: WeakKeyDictionary[CapturedStep, dict[tuple[int, Kind], CapturedDraft]] = WeakKeyDictionary()

    def after(
        self,
        ran: ComputedStep,
        tokens: torch.Tensor,
        considered: list[int],
        count: int,
        on_preparing: Callable[[], None],
    ) -> torch.Tensor:
        """Absorb a step into the drafter and draft `count` tokens for each ready request, in their order. See
        `speculate`.

        Nothing waits for the device.

        Args:
            tokens: int64 [R], sampled at the rows of ran.logits.
            considered: how many draft tokens of each ready request may be accepted.
        """
        next_ids = self._next_ids(ran, tokens)
        if ran.step is not None:
            return self._captured(ran, ran.step, next_ids, considered, count, on_preparing)
        ready, width = ran.ready, max((len(chunk.drafts) for chunk in ran.ready), default=0)
        padded = [[*chunk.drafts, *[0] * (width - len(chunk.drafts))] for chunk in ready]
        sequences = [chunk.request.sequence for chunk in ready]
        columns = [
            [one.slot for one in sequences if one is not None],
            [chunk.end - 1 for chunk in ready],
            ran.newest(),
            considered,
            *map(list, zip(*padded, strict=True)),
        ]
        slots, starts, rows, drafted, *drafts = upload(
            torch.tensor(columns, dtype=torch.int64, device="cpu"), self._device
        )
        own = torch.stack(drafts, 1) if drafts else slots.new_empty(len(ready), 0)
        draws = Draws.of(_samplings(ready), [0] * len(ready), self._device)
        verified = Verified(slots, starts, rows, drafted, own)
        return speculate(self.drafter, (ran.hidden, ran.batch), next_ids, verified, draws, count if ready else 0)

    def _next_ids(self, ran: ComputedStep, tokens: torch.Tensor) -> torch.Tensor:
        """Return the token after each row of the step, int64 [T]: from the prompt, or sampled."""
        count = len(ran.hidden.streams)
        known, rows = [0] * count, ran.rows()
        for chunk, base in zip(ran.chunks, ran.bases, strict=True):
            following = chunk.request.ids[chunk.first + 1 : chunk.end + 1]
            known[base : base + len(following)] = following
        numbers = upload(torch.tensor(known + rows, dtype=torch.int64, device="cpu"), self._device)
        return numbers[:count].scatter(0, numbers[count:], tokens)

    def _captured(
        self,
        ran: ComputedStep,
        step: CapturedStep,
        next_ids: torch.Tensor,
        considered: list[int],
        count: int,
        on_preparing: Callable[[], None],
    ) -> torch.Tensor:
        kind = kind_of(_samplings(ran.ready)) if count else "greedy"
        prepared = self._steps.setdefault(step, {})
        if (count, kind) not in prepared:
            assert self._graphs is not None
            on_preparing()
            prepared[count, kind] = CapturedDraft(self.drafter, self._graphs, step, count, kind)
        places = [row // step.rows for row in ran.newest()]
        made = prepared[count, kind].run(next_ids, places, considered, _samplings(ran.ready))
        if places == list(range(len(made))):
            return made
        return made[upload(torch.tensor(places, dtype=torch.int64, device="cpu"), self._device)]


class CapturedDraft:
    """The drafter's part of a captured step. All sequences of the step draft alike."""

    def __init__(self, drafter: Drafter, graphs: GraphRunner, step: CapturedStep, count: int, kind: Kind) -> None:
        """Capture the drafting after `step`."""
        numbers, device = step.numbers, step.numbers.slots.device
        self._next_ids = torch.zeros(step.size * step.rows, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(6, step.size, dtype=torch.int64, device=device)
        held, drafted, next_ids = step.held, self._numbers[5], self._next_ids
        draws = Draws.within(self._numbers[:5], kind)
        rows, drafts = step.rows, numbers.ids.view(step.size, step.rows)[:, 1:]

        def compute() -> torch.Tensor:
            first = torch.arange(0, len(next_ids), rows, device=device)
            verified = Verified(numbers.slots, numbers.starts, first, drafted, drafts)
            [own] = held
            return speculate(drafter, (own.hidden, own.batch), next_ids, verified, draws, count)

        self._run = graphs.capture(compute)

    def run(
        self, next_ids: torch.Tensor, places: list[int], considered: list[int], samplings: list[Sampling]
    ) -> torch.Tensor:
        """Return what `speculate` returns for every sequence of the step. The next call overwrites it.

        Args:
            places: the ready sequences.
            considered: how many of each one's draft tokens to consider.
            samplings: how each one samples.
        """
        size = self._numbers.shape[1]
        every, drafted = [Sampling(0.0)] * size, [0] * size
        for place, sampling, most in zip(places, samplings, considered, strict=True):
            every[place], drafted[place] = sampling, most
        numbers = torch.cat((packed(every, [0] * size), torch.tensor([drafted], device="cpu")))
        self._numbers.copy_(upload(numbers, self._numbers.device))
        self._next_ids.copy_(next_ids)
        return self._run()


def _samplings(chunks: list[Chunk]) -> list[Sampling]:
    return [chunk.request.sampling for chunk in chunks]
