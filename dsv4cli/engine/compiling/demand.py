"""What a run asks of a model, as far as it decides which kernels are launched, and the steps that this makes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from dsv4cli.engine.config.capacity import MAX_SLOTS, MAX_STEP_TOKENS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.runtime.drafts.drafters import most_drafts, usual_drafts
from dsv4cli.engine.runtime.limits import context_of, workload_of
from dsv4cli.engine.runtime.sampling.sampler import kind_of
from dsv4cli.engine.runtime.state.capacity import FEWEST_TOKENS
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.weights.placement import FreeMemory
from dsv4cli.engine.weights.reserve import CHUNKS, FAR, Workload

if TYPE_CHECKING:
    from dsv4cli.engine.model.numerics import Numerics

# how clients may have tokens drawn, of each kind one
WAYS = (Sampling(0.0), Sampling(1.0), Sampling(1.0, 0.5))
# tokens before a chunk of a prompt whose length is not known
PLACES = tuple(1 << power for power in range(2, 17))
# numbers from which the search for those that need other kernels begins
ROWS = (1, 2, 4, 8, 9, *(count + more for count in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096) for more in (0, 1)))
# tokens of each of several prompts
EACH = (2, 12, 24, 48, 96, 192, 384, 768)
# in chunks of up to so many tokens several kernels depend on the tokens before them, in longer ones the choice of
# entries does
FEW = 64


@dataclass(frozen=True)
class Demand:
    """config, formats: of the model. dtype, simulate, exact: as `Numerics` has them. ranks: that share it.
    sequences: at once. length: the tokens of the one prompt, None where that is not known or there are several.
    longest: the most tokens of a sequence that steps are captured for, one after another; none where nothing is drawn.
    context: the most tokens of a sequence. chunk: the most of a prompt in a step.
    samplings: how tokens may be drawn. drafting: what of a drafter is used.
    memory: what each rank finds, None where all weights lie on the GPU. load: for which that has to do, chunks, too."""

    config: ModelConfig
    formats: Formats
    dtype: str
    simulate: bool
    exact: bool
    ranks: int
    sequences: int
    length: int | None
    longest: tuple[int, ...]
    context: int
    chunk: int
    samplings: tuple[Sampling, ...]
    drafting: Drafting
    memory: FreeMemory | None = None
    load: Workload = Workload()  # noqa: RUF009 - frozen

    @property
    def drafts(self) -> int:
        """The most in a step."""
        if self.config.drafter == "none":
            return 0
        most = self.drafting.most
        return usual_drafts(self.config) if most is None else min(most, most_drafts(self.config))


@dataclass(frozen=True)
class Step:
    """chunks: of each sequence its tokens in the step, and those before it. sampling: how it draws. longest: that steps
    are captured for, None where nothing is drawn. drafts: to verify behind each. count: to make after the step."""

    chunks: tuple[tuple[int, int], ...]
    sampling: Sampling
    longest: int | None
    drafts: int = 0
    count: int = 0


@dataclass(frozen=True)
class Span:
    """Steps of which all numbers from `first` to `last` may come: of tokens in a chunk behind `place` others, or, where
    `each` is not 0, of sequences that each have a chunk of so many tokens. sampling, longest, count: as of `Step`."""

    first: int
    last: int
    sampling: Sampling
    longest: int | None
    place: int = 0
    each: int = 0
    count: int = 0

    def step(self, number: int) -> Step:
        """One of them."""
        chunks = ((self.each, self.place),) * number if self.each else ((number, self.place),)
        return Step(chunks, self.sampling, self.longest, 0, self.count)


def decoding(demand: Demand, sizes: tuple[int, ...]) -> Iterator[Step]:
    """The steps that follow prompts: of each number of sequences that is captured, with each number of drafts."""
    most = next(number for number, size in enumerate(sizes) if size >= min(demand.sequences, MAX_SLOTS))
    for (longest, sampling), size in product(_drawn(demand.longest, demand.samplings), sizes[: most + 1]):
        drafts = min(demand.drafts, max(MAX_SLOTS // size - 1, 0))
        for verified in range(drafts + 1):
            yield Step(((1, 1),) * size, sampling, longest, verified, drafts)


def prompts(demand: Demand) -> Iterator[Step | Span]:
    """The steps of prompts: of one whose length is known its chunks, else all that there may be."""
    longest, drafts, sampling = min(demand.longest, default=None), demand.drafts, demand.samplings[0]
    if demand.length is not None:
        for start in range(0, demand.length, demand.chunk):
            count = min(demand.chunk, demand.length - start)
            yield Step(((count, start),), sampling, longest, 0, drafts if start + count == demand.length else 0)
        return
    most = min(demand.chunk if demand.sequences == 1 else MAX_STEP_TOKENS, demand.context)
    # drafts behind a step know only of how many sequences it is
    yield from (Span(first, last, sampling, longest, count=0 if first > 1 else drafts) for first, last in _parts(most))
    for each, one in _drawn(EACH, demand.samplings) if demand.sequences > 1 else ():
        if each <= demand.context:
            several = _parts(min(demand.sequences, MAX_STEP_TOKENS // each))
            count = 0 if each > EACH[0] else drafts
            yield from (Span(first, last, one, longest, each=each, count=count) for first, last in several)
    for place in PLACES:
        # what steps are captured for when a sequence is as long as that
        longer = min((one for one in demand.longest if one > place + FEW), default=max(demand.longest, default=None))
        for first, last in _parts(min(FEW, demand.context - place)) if place < demand.context else ():
            yield Span(first, last, sampling, longer, place)
        if place + FEW < demand.context:
            yield Span(FEW + 1, FEW + 1, sampling, longer, place)


def _drawn(computed: Sequence[int], samplings: Sequence[Sampling]) -> list[tuple[int, Sampling]]:
    """How each is drawn: all alike, and the first in every way. What draws knows only how many rows there are."""
    return [(one, samplings[0]) for one in computed] + [(one, way) for one in computed[:1] for way in samplings[1:]]


def _parts(most: int) -> Iterator[tuple[int, int]]:
    """1 to `most` in parts."""
    ends = [*(count for count in ROWS if count < most), most]
    return zip(ends, ends[1:] or ends, strict=False)


def demand_of(
    config: ModelConfig,
    formats: Formats,
    numerics: "Numerics",
    limits: Limits,
    samplings: Sequence[Sampling],
    drafting: Drafting,
    lengths: Sequence[int] | None,
    *,
    ranks: int = 1,
    sequences: int = 1,
    drawn: bool = True,
    memory: FreeMemory | None = None,
    cache_memory: int | None = None,
) -> Demand:
    """What prompts of these lengths ask, None where they are not known: `sequences` conversations at once, which share
    `cache_memory` bytes if they are told to. drawn: whether they are answered."""
    context = context_of(config, limits)
    ends = [min(length + limits.max_tokens, context) for length in lengths or ()]
    longest = (max(ends),) if ends else tuple(_doublings(min(context, FAR)))
    return Demand(
        config=config if drawn and drafting.most != 0 else config.without_drafter(),
        formats=formats,
        dtype=str(numerics.dtype).removeprefix("torch."),
        simulate=numerics.simulate,
        exact=numerics.exact,
        ranks=ranks,
        sequences=min(max(len(lengths or ()), sequences), MAX_SLOTS),
        length=lengths[0] if lengths is not None and len(lengths) == 1 else None,
        longest=longest if drawn else (),
        context=context,
        chunk=limits.prefill_chunk or CHUNKS[0],
        samplings=tuple({kind_of((one,)): replace(one, seed=0) for one in samplings}.values()),
        drafting=drafting if drawn else NO_DRAFTS,
        memory=memory,
        load=workload_of(config, limits, lengths, sequences=sequences, drawn=drawn, cache_memory=cache_memory),
    )


def _doublings(context: int) -> Iterator[int]:
    """What steps of a conversation are captured for, one after another."""
    tokens = FEWEST_TOKENS
    while tokens < context:
        yield tokens
        tokens *= 2
    yield context
