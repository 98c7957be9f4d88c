"""Benchmark cases: the start and end of a step, which are the index tensors of its tokens, and sampling."""

from collections.abc import Iterator

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.profiling.bounds import EXACT, FP32, NOISE, ROTATIONS
from dsv4cli.engine.profiling.case import Case, Competitor, Operation, Tensors, Work
from dsv4cli.engine.profiling.inputs import BenchmarkInputs
from dsv4cli.engine.runtime.batch_builder import Extent, Numbers, batch_of
from dsv4cli.kernels import sampling
from dsv4cli.kernels.dispatch import use
from dsv4cli.kernels.sampling import ref as sampling_ref

TEMPERATURE, TOP_P, TOP_K, MIN_P, PENALTY = 1.0, 0.95, 50, 0.02, 1.5


def places(bench: BenchmarkInputs) -> Iterator[Case]:
    """Yield the case that builds all index tensors of a decode step or a prompt from numbers on the device."""
    tokens, sequences, count = bench.tokens, bench.sequences, bench.tokens // bench.sequences
    columns = -(-bench.context // BLOCK_TOKENS)
    # block tables as wide as the blocks, as in GraphRunner.batch
    extent = Extent.of(bench.config, [count] * sequences, columns * BLOCK_TOKENS)

    def build(bench: BenchmarkInputs) -> Work:
        cache, ids = bench.cache(), torch.zeros(tokens, dtype=torch.int64, device=bench.device)
        slots = torch.arange(sequences, device=bench.device)
        starts, counts = torch.full_like(slots, bench.context - count), torch.full_like(slots, count)
        none = torch.zeros_like(slots)
        blocks = torch.arange(sequences * columns, device=bench.device).view(sequences, columns)

        def run(slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, blocks: torch.Tensor) -> Tensors:
            return _tensors(batch_of(cache, Numbers(slots, starts, counts, none, ids, blocks), extent))

        def reference(*numbers: torch.Tensor) -> Tensors:
            with use("torch"):
                return run(*numbers)

        return Work((slots, starts, counts, blocks), run, reference, 0)

    lists = 2 * bench.config.sliding_window + extent.entries.get(128, 0)
    needs = 8 * (tokens * lists + sequences * sum(extent.entries.values()))
    words = f"{sequences} x {count} tokens, {bench.context} in all"
    yield Case("places", "places", words, needs, needs, ROTATIONS, build, exact=True)


def _tensors(batch: Batch) -> Tensors:
    """Return the tensors of a batch."""
    entries = batch.entries.values()
    turns = (*batch.rotations.values(), *(one.rotation for one in entries))
    return (
        batch.positions, batch.sequence, batch.last,
        batch.window_index, batch.window_columns, batch.window_cells, batch.every_entry,
        *(part for one in entries for part in (one.groups, one.cells, one.visible, one.table)),
        *(torch.view_as_real(turn) for turn in turns),
    )  # fmt: skip


def samplers(bench: BenchmarkInputs) -> Iterator[Case]:
    """Yield the parts of sampling: greedy, nucleus (top-p), its noise, a token's probability, and logsumexp."""
    # every rank has the logits of the whole vocabulary
    rows, width = bench.sequences, bench.shapes.config.vocab_size
    needs, words = 4 * rows * width, f"{rows} rows of {width}"

    def greedy(bench: BenchmarkInputs) -> Work:
        logits = bench.randn(rows, width, dtype=torch.float32)
        rival = Competitor("torch.argmax", lambda logits: (logits, -1), torch.argmax)
        return Work((logits,), sampling.greedy, sampling_ref.greedy, 0, rival=rival)

    def draw(bench: BenchmarkInputs) -> Work:
        def through(operation: Operation) -> Operation:
            return lambda logits, noise: operation(logits, noise, temperatures, limits)

        logits, noise = (bench.randn(rows, width, dtype=torch.float32) for _ in range(2))
        temperatures = torch.full((rows,), TEMPERATURE, device=bench.device)
        limits = torch.full((rows,), sampling.limit_of(TOP_P), device=bench.device)
        return Work((logits, noise.exp()), through(sampling.draw_nucleus), through(sampling_ref.draw_nucleus), 0)

    def noise(bench: BenchmarkInputs) -> Work:
        def through(operation: Operation) -> Operation:
            return lambda seeds, lengths: operation(seeds, lengths, width)

        seeds = torch.arange(rows, device=bench.device)
        lengths = torch.full_like(seeds, bench.context)
        return Work((seeds, lengths), through(sampling.noise), through(sampling_ref.noise), 0)

    def chance(bench: BenchmarkInputs) -> Work:
        logits, tokens = bench.randn(rows, width, dtype=torch.float32), torch.arange(rows, device=bench.device)
        return Work((logits, tokens), sampling.chance_of, sampling_ref.chance_of, 0)

    def total(bench: BenchmarkInputs) -> Work:
        return Work((bench.randn(rows, width, dtype=torch.float32),), sampling.logsumexp, sampling_ref.logsumexp, 0)

    yield Case("greedy", "sampling", words, needs, rows * width, EXACT, greedy)
    yield Case("draw", "sampling", f"{words}, top-p {TOP_P}", 2 * needs, 50 * rows * width, EXACT, draw)
    yield Case("noise", "sampling", words, needs, 50 * rows * width, NOISE, noise)
    yield Case("chance", "sampling", words, needs, 20 * rows * width, FP32, chance)
    yield Case("logsumexp", "sampling", words, needs, 20 * rows * width, FP32, total)


def filters(bench: BenchmarkInputs) -> Iterator[Case]:
    """Yield what changes logits before the draw: penalties, and top-k with min-p."""
    rows, width = bench.sequences, bench.shapes.config.vocab_size
    needs, words = 4 * rows * width, f"{rows} rows of {width}"

    def penalties(bench: BenchmarkInputs) -> Work:
        # half of the vocabulary occurs
        seen = torch.arange(width, device=bench.device, dtype=torch.int32).remainder(4).sub(1).clamp(min=0)
        numbers = torch.arange(rows, device=bench.device)
        drafts, own = numbers.new_zeros(0, rows), torch.full((3, rows), PENALTY, device=bench.device)

        def through(operation: Operation) -> Operation:
            return lambda logits, seen: operation(logits, seen, numbers, drafts, own)

        logits = bench.randn(rows, width, dtype=torch.float32)
        return Work((logits, seen.repeat(rows, 1)), through(sampling.penalize), through(sampling_ref.penalize), 0)

    def top_k(bench: BenchmarkInputs) -> Work:
        def through(operation: Operation) -> Operation:
            return lambda logits: operation(logits, counts, gaps)

        counts = torch.full((rows,), TOP_K, device=bench.device)
        gaps = torch.full((rows,), sampling.gap_of(MIN_P, TEMPERATURE), device=bench.device)
        logits = bench.randn(rows, width, dtype=torch.float32)
        return Work((logits,), through(sampling.keep_likeliest), through(sampling_ref.keep_likeliest), 0)

    words_of_top_k = f"{words}, top-k {TOP_K}, min-p {MIN_P}"
    yield Case("penalties", "sampling", words, 3 * needs, 10 * rows * width, EXACT, penalties)
    yield Case("top-k", "sampling", words_of_top_k, 2 * needs, 20 * rows * width, EXACT, top_k)
