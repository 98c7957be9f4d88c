"""What a run asks of a model, as far as it decides which kernels are launched, and the steps that this makes; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4cli.engine.config.capacity import MAX_SLOTS, MAX_STEP_TOKENS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.settings import Sampling

# tokens before a chunk of a prompt of unknown length; of longer ones the first compiles what else it needs
FAR = 131_072
PLACES = tuple(1 << power for power in range(7, 17))
# numbers from which the search for those that need other kernels begins
ROWS = (1, 2, 4, 8, 9, *(count + more for count in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096) for more in (0, 1)))
# in chunks of so many tokens at most kernels depend on the tokens before them too
FEW = 64


@dataclass(frozen=True)
class Workload:
    """config, formats, dtype, simulate, exact: of the model, as `Numerics` has them. ranks: that share it. sequences:
    at once. longest: the most tokens of a sequence that steps are captured for, None where nothing is drawn. lengths:
    the tokens of each prompt, None where they are not known. context: the most tokens of a sequence. chunk: the most of
    a prompt in a step. sampling: how tokens are drawn. drafts: the most in a step."""

    config: ModelConfig
    formats: Formats
    dtype: str
    simulate: bool
    exact: bool
    ranks: int
    sequences: int
    longest: int | None
    lengths: tuple[int, ...] | None
    context: int
    chunk: int
    sampling: Sampling
    drafts: int


@dataclass(frozen=True)
class Step:
    """chunks: of each sequence its tokens in the step, and those before it. drafts: to verify behind each. count: to
    make after the step."""

    chunks: tuple[tuple[int, int], ...]
    drafts: int = 0
    count: int = 0


@dataclass(frozen=True)
class Span:
    """Steps of which all numbers from `first` to `last` may come: of tokens in a chunk behind `place` others, or of
    sequences that each have a chunk of two tokens. count: as of `Step`."""

    first: int
    last: int
    place: int = 0
    sequences: bool = False
    count: int = 0

    def step(self, number: int) -> Step:
        """One of them."""
        chunks = ((2, self.place),) * number if self.sequences else ((number, self.place),)
        return Step(chunks, 0, self.count)


def decoding(workload: Workload, sizes: tuple[int, ...]) -> Iterator[Step]:
    """The steps that follow prompts: of each number of sequences that is captured, with each number of drafts."""
    if workload.longest is None:
        return
    most = next(number for number, size in enumerate(sizes) if size >= min(workload.sequences, MAX_SLOTS))
    for size in sizes[: most + 1]:
        drafts = min(workload.drafts, max(MAX_SLOTS // size - 1, 0))
        for verified in range(drafts + 1):
            yield Step(((1, 1),) * size, verified, drafts)


def prompts(workload: Workload) -> Iterator[Step | Span]:
    """The steps of prompts: of one whose length is known its chunks, else all that there may be."""
    if workload.sequences == 1 and workload.lengths:
        for start in range(0, workload.lengths[0], workload.chunk):
            rest = workload.lengths[0] - start
            count = workload.drafts if rest <= workload.chunk else 0
            yield Step(((min(workload.chunk, rest), start),), 0, count)
        return
    most = min(workload.chunk if workload.sequences == 1 else MAX_STEP_TOKENS, workload.context)
    yield from (Span(first, last, count=workload.drafts) for first, last in _parts(most))
    for first, last in _parts(min(workload.sequences, MAX_SLOTS)) if workload.sequences > 1 else ():
        yield Span(first, last, sequences=True, count=workload.drafts)
    for place in PLACES:
        for first, last in _parts(FEW):
            if place + last <= min(workload.context, FAR):
                yield Span(first, last, place)


def _parts(most: int) -> Iterator[tuple[int, int]]:
    """1 to `most` in parts."""
    ends = [*(count for count in ROWS if count < most), most]
    return zip(ends, ends[1:] or ends, strict=False)
