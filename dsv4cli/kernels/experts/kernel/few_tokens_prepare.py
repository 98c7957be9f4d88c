"""Preparation for the products of few tokens, in one launch: arranges inputs, sorts pairs, clears counters.

Also arranges the inputs of the second product, from the results of the first.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import through_fp8
from dsv4cli.kernels.experts.kernel.dequant_mma import INPUT_FACTOR
from dsv4cli.kernels.experts.kernel.grouped_gemm import gated_values
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs

# columns that a program arranges; pairs that a program places, and pairs that it compares them with at a time
COLUMNS, PAIRS, OTHERS = 1024, 16, 128
# counters that a program sets to zero
COUNTERS = 1024

_FACTOR = tl.constexpr(INPUT_FACTOR)


@triton.jit
def arranged(column, H: tl.constexpr):
    """Return the position of a column in the products' inputs: of every 8H columns, [u, v, h, j] is at [j, v, u, h]."""
    within = column % (8 * H)
    word = within // (2 * H)
    return column - within + within % H * 8 + word % 2 * 4 + word // 2 * 2 + within // H % 2


@triton.jit
def as_input(values, ROUND: tl.constexpr):
    """Convert values fp32 [n, 128] to bf16 inputs of products; with ROUND, through FP8 with one scale per row."""
    if ROUND:
        values = through_fp8(values)
    return (values * _FACTOR).to(tl.bfloat16)


@triton.jit
def store_inner(
    gate,  # fp32 [ROWS, TOKENS] w1 x
    up,  # w3 x
    factor,  # fp32 [TOKENS]
    position,  # int64 [TOKENS] of inner, >= 0
    real,  # bool [TOKENS]
    inner,  # bf16 [INNER] at each position: inputs of products
    raw,  # the same before rounding
    counter,  # of programs that have stored their part of 128 inner values
    first,
    limit,
    INNER: tl.constexpr,
    ROUND: tl.constexpr,
    H: tl.constexpr,  # of the products
):
    ROWS: tl.constexpr = gate.shape[0]
    gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    values = (factor[None] * gated_values(gate, up, limit)).to(tl.bfloat16)
    row = first + tl.arange(0, ROWS)
    if not ROUND:
        place = position[None] * INNER + arranged(row, H)[:, None]
        tl.store(inner + place, as_input(values.to(tl.float32), False), real[None])
    else:
        tl.store(raw + position[None] * INNER + row[:, None], values, real[None])
        tl.debug_barrier()  # until all threads have stored, before the counter
        if tl.atomic_add(counter, 1, sem="acq_rel") == 128 // ROWS - 1:
            column = first // 128 * 128 + tl.arange(0, 128)
            place = position[:, None] * INNER + column[None]
            block = tl.load(raw + place, real[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
            place = position[:, None] * INNER + arranged(column, H)[None]
            tl.store(inner + place, as_input(block, True), real[:, None])


@triton.jit
def _place_pairs(
    first, experts, rows, order, place, chunks, pairs,
    SIZE: tl.constexpr, NUMBER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Rank pairs first .. first + NUMBER - 1 by expert and cut each expert's pairs into chunks of up to CHUNK.

    A chunk is stored at the position where it starts, an empty one at all other positions.
    """
    pair = first + tl.arange(0, NUMBER)[:, None]
    expert = tl.load(experts + pair, pair < pairs, other=0)
    rank = tl.zeros((NUMBER,), tl.int32)
    before = tl.zeros((NUMBER,), tl.int32)
    same = tl.zeros((NUMBER,), tl.int32)
    for start in range(0, pairs, SIZE):
        other = start + tl.arange(0, SIZE)[None]
        others = tl.load(experts + other, other < pairs, other=0)
        equal = (others == expert) & (other < pairs)
        earlier = equal & (other < pair)
        less = (others < expert) & (other < pairs)
        rank += tl.sum((less | earlier).to(tl.int32), 1)
        before += tl.sum(earlier.to(tl.int32), 1)
        same += tl.sum(equal.to(tl.int32), 1)
    begins = before % CHUNK == 0
    size = tl.where(begins, tl.minimum(same - before, CHUNK), 0)
    number = first + tl.arange(0, NUMBER)
    inside = number < pairs
    tl.store(order + rank, number, inside)
    tl.store(place + number, rank, inside)
    row = tl.sum(expert, 1)
    if rows is not None:
        row = tl.load(rows + row)
    tl.store(chunks + rank, packed_chunk(row, rank, size), inside)


@triton.jit
def _of_expert(values, mine):
    """Return the value of each pair's expert, from values [BINS] by expert. mine: bool [NUMBER, BINS]."""
    return tl.sum(tl.where(mine, values[None], 0), 1)


@triton.jit
def _list_chunks(
    first, experts, rows, order, place, chunks, pairs,
    SIZE: tl.constexpr, NUMBER: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Do what `_place_pairs` does, but list chunks densely: those of more than SMALL pairs first, empty ones last."""
    pair = first + tl.arange(0, NUMBER)[:, None]
    expert = tl.load(experts + pair, pair < pairs, other=0).to(tl.int32)
    mine = expert == tl.arange(0, BINS)[None]
    counts = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((NUMBER,), tl.int32)
    for start in range(0, pairs, SIZE):
        other = start + tl.arange(0, SIZE)
        others = tl.load(experts + other, other < pairs, other=0).to(tl.int32)
        counts += tl.histogram(others, BINS, mask=other < pairs)
        before += tl.sum(((others[None] == expert) & (other[None] < pair)).to(tl.int32), 1)
    large = (counts + CHUNK - SMALL - 1) // CHUNK
    small = (counts + CHUNK - 1) // CHUNK - large
    rank = _of_expert(tl.cumsum(counts, 0) - counts, mine) + before
    size = tl.minimum(_of_expert(counts, mine) - before, CHUNK)
    # only an expert's last chunk can be small
    among_large = _of_expert(tl.cumsum(large, 0) - large, mine) + before // CHUNK
    among_small = _of_expert(tl.cumsum(small, 0) - small, mine) + tl.sum(large, 0)
    number = first + tl.arange(0, NUMBER)
    inside = number < pairs
    tl.store(order + rank, number, inside)
    tl.store(place + number, rank, inside)
    row = tl.sum(expert, 1)
    if rows is not None:
        row = tl.load(rows + row)
    listed = tl.where(size > SMALL, among_large, among_small)
    tl.store(chunks + listed, packed_chunk(row, rank, size), inside & (before % CHUNK == 0))
    nothing = tl.zeros((NUMBER,), tl.int64)
    tl.store(chunks + number, nothing, inside & (number >= tl.sum(large + small, 0)))


@triton.jit
def packed_chunk(row, begin, size):
    """Pack a chunk into one word: the expert's row in the stacks, the first position, and the number of pairs."""
    return row.to(tl.int64) << 32 | begin.to(tl.int64) << 8 | size


@triton.jit
def chunk_parts(chunk):
    """Return the row, the first position and the size of a chunk. Size 0 means no chunk."""
    return chunk >> 32, ((chunk & 0xFFFFFFFF) >> 8).to(tl.int32), (chunk & 255).to(tl.int32)


@launched(do_not_specialize=["tokens", "pairs", "counts"])
def prepare(
    x,  # bf16 [tokens, K]
    experts,  # int64 [pairs]
    rows,  # int64 [E] of the stacks, or None
    inputs,  # bf16 [tokens, K] in the order of FP4 products
    shared_inputs,  # the same in that of FP8 products, if SHARED
    order,  # int32 [pairs] the pair at each position, sorted by expert
    place,  # int32 [pairs] the position of each pair
    chunks,  # int64 [pairs] chunks, as chunk_parts reads them, and nothing
    counters,  # int32 [counts], set to zero
    tokens,
    pairs,
    counts,
    stride,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    ROUND: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    OTHERS: tl.constexpr,
    COUNTERS: tl.constexpr,
    SMALL: tl.constexpr,
    BINS: tl.constexpr,  # bins of experts if chunks are listed one after another, else 0
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    parts: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    if program < tokens * parts:
        token = (program // parts).to(tl.int64)
        block = program % parts * (COLUMNS // 128) + tl.arange(0, COLUMNS // 128)[:, None]
        column = block * 128 + tl.arange(0, 128)[None]
        inside = column < K
        values = tl.load(x + token * stride + column, inside, other=0.0).to(tl.float32)
        values = as_input(values, ROUND)
        tl.store(inputs + token * K + arranged(column, 4), values, inside)
        if SHARED:
            tl.store(shared_inputs + token * K + arranged(column, 2), values, inside)
    else:
        number = program - tokens * parts
        if number * COUNTERS < counts:
            counter = number * COUNTERS + tl.arange(0, COUNTERS)
            tl.store(counters + counter, tl.zeros((COUNTERS,), tl.int32), counter < counts)
        if BINS > 0 and number * PAIRS < pairs:
            _list_chunks(number * PAIRS, experts, rows, order, place, chunks, pairs, OTHERS, PAIRS, CHUNK, SMALL, BINS)
        elif number * PAIRS < pairs:
            _place_pairs(number * PAIRS, experts, rows, order, place, chunks, pairs, OTHERS, PAIRS, CHUNK)
