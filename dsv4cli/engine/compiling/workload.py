"""What a run asks of a model, as far as it decides which kernels are launched, and the steps that this makes; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4cli.engine.config.capacity import MAX_SLOTS, MAX_STEP_TOKENS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.settings import Sampling

# steps captured in graphs are prepared anew for each doubling of the context: as many tokens as nearly all answers have
FAR = 131_072
# tokens before a chunk of unknown place: between two of these nothing else is compiled
PLACES = tuple(1 << power for power in range(7, 21))
# rows of chunks of unknown length, from which the search for those that need other kernels begins
ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, *(count + more for count in (128, 256, 512, 1024, 2048) for more in (0, 1)))


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
    make after the step. scored: whether rows are scored and nothing is drawn."""

    chunks: tuple[tuple[int, int], ...]
    drafts: int = 0
    count: int = 0
    scored: bool = False


@dataclass(frozen=True)
class Span:
    """Steps of chunks of `first` to `last` tokens, after others: their lengths are not known."""

    first: int
    last: int
    place: int = 0
    others: int = 0


def decoding(workload: Workload, sizes: tuple[int, ...], rows: tuple[int, ...]) -> Iterator[Step]:
    """The steps that follow a prompt: of each number of sequences and of rows that is captured."""
    if workload.longest is None:
        return
    most = next(size for size in sizes if size >= min(workload.sequences, MAX_SLOTS))
    for size in sizes[: sizes.index(most) + 1]:
        room = max(MAX_SLOTS // size - 1, 0)
        drafts = min(workload.drafts, room)
        wanted = [count - 1 for count in rows if count - 1 <= drafts]
        wanted += [drafts] if drafts not in wanted else []
        for verified in wanted:
            yield Step(((1, 1),) * size, verified, drafts)


def known_chunks(workload: Workload) -> Iterator[Step]:
    """The steps of prompts whose lengths are known, of one sequence each."""
    for length in sorted(set(workload.lengths or ())):
        for start in range(0, length, workload.chunk):
            count = workload.drafts if start + workload.chunk >= length else 0
            yield Step(((min(workload.chunk, length - start), start),), 0, count, workload.longest is None)


def unknown_chunks(workload: Workload) -> Iterator[Span]:
    """The steps of prompts whose lengths are not known, or that come beside others."""
    if workload.lengths is not None and workload.sequences == 1:
        return
    most = min(workload.chunk if workload.sequences == 1 else MAX_STEP_TOKENS, workload.context)
    ends = [*(count for count in ROWS if count < most), most]
    places = [0, *(place for place in PLACES if place < min(workload.context, FAR))]
    for first, last in zip(ends, ends[1:], strict=False):
        yield Span(first, last)
    for place in places[1:]:
        for first, last in ((1, 16), (17, 64), (65, min(most, 65 * 4))):
            if last < workload.context - place:
                yield Span(first, last, place)
