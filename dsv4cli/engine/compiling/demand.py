"""The properties of a run that determine which kernels it launches, and the steps that follow from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from dsv4cli.engine.config.capacity import MAX_SLOTS, MAX_STEP_TOKENS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.runtime.drafts.drafters import default_drafts, most_drafts
from dsv4cli.engine.runtime.limits import context_of, workload_of
from dsv4cli.engine.runtime.sampling.sampler import kind_of
from dsv4cli.engine.runtime.state.capacity import FEWEST_TOKENS
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.weights.placement import FreeMemory
from dsv4cli.engine.weights.reserve import CHUNKS, FAR, Workload

if TYPE_CHECKING:
    from dsv4cli.engine.model.numerics import Numerics

# one sampling setting of each kind that clients may use, one of them with penalties
SAMPLING_KINDS = (Sampling(0.0), Sampling(1.0), Sampling(1.0, 0.5), Sampling(1.0, top_k=20, presence_penalty=1.0))
# earlier tokens before a chunk, to try for a prompt of unknown length
PLACES = tuple(1 << power for power in range(2, 17))
# boundaries of the ranges in which the search for sizes that need other kernels begins
ROWS = (1, 2, 4, 8, 9, *(count + more for count in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096) for more in (0, 1)))
# tokens of each prompt, to try for steps with several prompts
EACH = (2, 12, 24, 48, 96, 192, 384, 768)
# in chunks of up to this many tokens, several kernels depend on the number of earlier tokens; in longer chunks, only
# the indexer's scores and top-k do
FEW = 64


@dataclass(frozen=True)
class Demand:
    """The properties of a run that determine which kernels it launches.

    Attributes:
        config, formats: the model's configuration and storage formats.
        dtype, simulate, exact: as in `Numerics`.
        ranks: number of tensor-parallel ranks.
        sequences: maximum batch size.
        length: tokens of the prompt; None if unknown or if there are several prompts.
        longest: sequence lengths that steps are captured for, in order; empty if no token is sampled.
        context: maximum length of a sequence in tokens.
        chunk: maximum prompt tokens in a step.
        samplings: possible sampling settings.
        drafting: how the drafter is used.
        memory: free memory of each rank; None if all weights fit on the GPU.
        load: the workload that the memory must suffice for, with its chunks.
        gguf_types: as of `Identity`.
    """

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
    gguf_types: Mapping[str, str] = field(default_factory=dict)

    @property
    def drafts(self) -> int:
        """Maximum draft tokens per sequence in a step."""
        if self.config.drafter == "none":
            return 0
        most = self.drafting.most
        return default_drafts(self.config) if most is None else min(most, most_drafts(self.config))


@dataclass(frozen=True)
class Step:
    """A step whose kernels are to be compiled.

    Attributes:
        chunks: (new tokens, earlier tokens) of each sequence.
        sampling: sampling settings of its requests.
        longest: length that steps are captured for; None if no token is sampled.
        drafts: draft tokens to verify per sequence.
        count: draft tokens to make after the step.
    """

    chunks: tuple[tuple[int, int], ...]
    sampling: Sampling
    longest: int | None
    drafts: int = 0
    count: int = 0


@dataclass(frozen=True)
class Span:
    """A range of possible steps: every size from `first` to `last` may occur.

    The size is the number of tokens in a chunk after `place` earlier tokens. If `each` is not 0, it is the number of
    sequences that have a chunk of `each` tokens. sampling, longest, count: as in `Step`.
    """

    first: int
    last: int
    sampling: Sampling
    longest: int | None
    place: int = 0
    each: int = 0
    count: int = 0

    def step(self, number: int) -> Step:
        """Return the step of this size."""
        chunks = ((self.each, self.place),) * number if self.each else ((number, self.place),)
        return Step(chunks, self.sampling, self.longest, 0, self.count)


def decoding(demand: Demand, sizes: tuple[int, ...]) -> Iterator[Step]:
    """Yield the decode steps: for each captured batch size, with each number of draft tokens."""
    most = next(number for number, size in enumerate(sizes) if size >= min(demand.sequences, MAX_SLOTS))
    for (longest, sampling), size in product(_sampled(demand.longest, demand.samplings), sizes[: most + 1]):
        drafts = min(demand.drafts, max(MAX_SLOTS // size - 1, 0))
        for verified in range(drafts + 1):
            yield Step(((1, 1),) * size, sampling, longest, verified, drafts)


def prompts(demand: Demand) -> Iterator[Step | Span]:
    """Yield the prefill steps: the chunks of a prompt of known length, or all possible steps."""
    longest, drafts, sampling = min(demand.longest, default=None), demand.drafts, demand.samplings[0]
    if demand.length is not None:
        for start in range(0, demand.length, demand.chunk):
            count = min(demand.chunk, demand.length - start)
            yield Step(((count, start),), sampling, longest, 0, drafts if start + count == demand.length else 0)
        return
    most = min(demand.chunk if demand.sequences == 1 else MAX_STEP_TOKENS, demand.context)
    # drafting after a step depends only on its number of sequences
    yield from (Span(first, last, sampling, longest, count=0 if first > 1 else drafts) for first, last in _parts(most))
    for each, one in _sampled(EACH, demand.samplings) if demand.sequences > 1 else ():
        if each <= demand.context:
            several = _parts(min(demand.sequences, MAX_STEP_TOKENS // each))
            count = 0 if each > EACH[0] else drafts
            yield from (Span(first, last, one, longest, each=each, count=count) for first, last in several)
    for place in PLACES:
        # the length that steps are captured for when a sequence has reached this length
        longer = min((one for one in demand.longest if one > place + FEW), default=max(demand.longest, default=None))
        for first, last in _parts(min(FEW, demand.context - place)) if place < demand.context else ():
            yield Span(first, last, sampling, longer, place)
        if place + FEW < demand.context:
            yield Span(FEW + 1, FEW + 1, sampling, longer, place)
    # scores depend on the product of new and earlier tokens: the largest chunk after the most earlier tokens
    far = max(demand.longest, default=demand.context) - most - 1
    if far > 0:
        yield Span(most, most, sampling, max(demand.longest, default=None), far)


def _sampled(computed: Sequence[int], samplings: Sequence[Sampling]) -> list[tuple[int, Sampling]]:
    """Pair all values with the first sampling, and the first value with every sampling.

    Other pairs launch no further kernels, because sampling depends only on the number of rows.
    """
    return [(one, samplings[0]) for one in computed] + [
        (one, sampling) for one in computed[:1] for sampling in samplings[1:]
    ]


def _parts(most: int) -> Iterator[tuple[int, int]]:
    """Split the range from 1 to `most` into parts that begin at `ROWS`."""
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
    sampled: bool = True,
    memory: FreeMemory | None = None,
    cache_memory: int | None = None,
    gguf_types: Mapping[str, str] | None = None,
) -> Demand:
    """Return the demand of a run.

    Args:
        lengths: lengths of the prompts in tokens; None if unknown.
        sequences: number of simultaneous conversations.
        sampled: whether the prompts are answered.
        cache_memory: bytes of KV cache that the conversations share; None if not limited.
        gguf_types: as of `Identity`; None for a model that is no GGUF file.
    """
    context = context_of(config, limits)
    ends = [min(length + limits.max_tokens, context) for length in lengths or ()]
    longest = (max(ends),) if ends else tuple(_doublings(min(context, FAR)))
    return Demand(
        config=config if sampled and drafting.most != 0 else config.without_drafter(),
        formats=formats,
        dtype=str(numerics.dtype).removeprefix("torch."),
        simulate=numerics.simulate,
        exact=numerics.exact,
        ranks=ranks,
        sequences=min(max(len(lengths or ()), sequences), MAX_SLOTS),
        length=lengths[0] if lengths is not None and len(lengths) == 1 else None,
        longest=longest if sampled else (),
        context=context,
        chunk=limits.prefill_chunk or CHUNKS[0],
        samplings=tuple({(kind_of((one,)), one.penalizes): replace(one, seed=0) for one in samplings}.values()),
        drafting=drafting if sampled else NO_DRAFTS,
        memory=memory,
        load=workload_of(config, limits, lengths, sequences=sequences, sampled=sampled, cache_memory=cache_memory),
        gguf_types=gguf_types or {},
    )


def _doublings(context: int) -> Iterator[int]:
    """Yield the sequence lengths that a conversation's steps are captured for, in order."""
    tokens = FEWEST_TOKENS
    while tokens < context:
        yield tokens
        tokens *= 2
    yield context
