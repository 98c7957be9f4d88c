"""Inputs of `fp8_wgmma`: rounded to e4m3 with one scale per 128 columns, in the column order of the codes, by chunk.

`prepare` also sorts the pairs of few tokens by expert; `arrange` takes pairs that `sort_by_expert` has sorted.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import FP8_FLOOR, FP8_LARGEST, scaled_blocks
from dsv4cli.kernels.experts.kernel.few_tokens_prepare import chunk_parts, packed_chunk
from dsv4cli.kernels.launch import launched
from dsv4cli.kernels.pdl import wait_for_inputs

# columns that a program of `prepare` rounds
COLUMNS = 512


@triton.jit
def place(column, tokens, FP4: tl.constexpr):
    """Return the byte offset of a column (below 128) of a chunk's first token, in the order [block of 32, token, byte].

    With FP4 weights, columns 8 t + 2 i and 8 t + 2 i + 1 of a block are the low and the high code of byte i of word t,
    and the low codes of all four words come first.
    """
    within = column % 32
    byte = within % 2 * 16 + within // 8 * 4 + within % 8 // 2 if FP4 else within
    return column // 32 * (32 * tokens) + byte


@triton.jit
def _rounded(x, place, inside):
    """Round blocks of 128 columns of x at offsets `place` [n]: codes uint8 [n, 128] and scales fp32 [n].

    Bypasses a cache that may be stale, for loads before the wait.
    """
    place = place[:, None] + tl.arange(0, 128)[None]
    values = tl.load(x + place, inside[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    values, scale = scaled_blocks(values, FP8_FLOOR, FP8_LARGEST)
    codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes, tl.reshape(scale, (scale.shape[0],)).to(tl.float32, bitcast=True)


@triton.jit
def _by_word(codes):
    """Arrange codes [n, 128] in the order of `fp8_inputs.place` for FP4 weights."""
    # block, word, byte, low or high
    by_byte = tl.reshape(codes, (codes.shape[0], 4, 4, 4, 2))
    return tl.reshape(tl.permute(by_byte, (0, 1, 4, 2, 3)), codes.shape)


@triton.jit
def _store(codes, scale, inputs, scales, chunk, width, slot, first, inside, K: tl.constexpr, TOKENS: tl.constexpr):
    """Store the rounded blocks of a token, from block `first` on, in a slot of a chunk of this width."""
    block = first + tl.arange(0, codes.shape[0])
    byte = tl.arange(0, 128)
    to = chunk.to(tl.int64) * (K * TOKENS) + slot * 32 + block * (128 * width)
    at = byte // 32 * (32 * width) + byte % 32
    tl.store(inputs + to[:, None] + at[None], codes, inside[:, None])
    tl.store(scales + chunk * (K // 128 * TOKENS) + block * TOKENS + slot, scale, inside)


@triton.jit
def _sorted(experts, mine, pairs, PAIRS: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr):
    """Sort pairs by expert and cut chunks of up to TOKENS.

    Returns for the pairs `mine`: expert, position, chunk, rank among the pairs of its expert, and their number;
    then the number of chunks.
    """
    pair = tl.arange(0, PAIRS)
    every = tl.load(experts + pair, pair < pairs, other=0).to(tl.int32)
    expert = tl.load(experts + mine, mine < pairs, other=0).to(tl.int32)
    counts = tl.histogram(every, BINS, mask=pair < pairs)
    cut = (counts + TOKENS - 1) // TOKENS
    before = (every[None] == expert[:, None]) & (pair[None] < mine[:, None]) & (pair < pairs)[None]
    rank = tl.sum(before.to(tl.int32), 1)
    position = tl.gather(tl.cumsum(counts, 0) - counts, expert, 0) + rank
    chunk = tl.gather(tl.cumsum(cut, 0) - cut, expert, 0) + rank // TOKENS
    return expert, position, chunk, rank, tl.gather(counts, expert, 0), tl.sum(cut, 0)


@triton.jit
def _clear(counters, chunk, inside, COUNTERS: tl.constexpr, BINS: tl.constexpr):
    """Set the counters of chunks [n] to zero."""
    counter = tl.arange(0, BINS)
    to = counters + chunk[:, None] * COUNTERS + counter[None]
    tl.store(to, tl.zeros(to.shape, tl.int32), inside[:, None] & (counter < COUNTERS)[None])


@launched(do_not_specialize=["pairs", "own_chunks"])
def prepare(
    x,  # bf16 [tokens, K]
    experts,  # int64 [pairs]
    rows,  # int64 [E] of the stacks, or None
    routing,  # fp32 [pairs]
    place,  # int32 [pairs] the position of each pair
    chunks,  # int64, routed experts' chunks as chunk_parts reads them
    count,  # int32: how many there are
    # uint8 [chunks, K * TOKENS], of each the first [K / 32, width, 32] e4m3, where the width is TOKENS, or NARROW for a
    # chunk of up to NARROW pairs; the shared expert's chunks first
    inputs,
    scales,  # fp32 [chunks, K / 128, TOKENS]
    factors,  # fp32 [chunks, TOKENS] the routing weight of each pair, 1 for the shared expert
    counters,  # int32 [chunks, COUNTERS], set to zero
    turns,  # int32 [TURNS], set to zero
    pairs,
    own_chunks,  # of the shared expert
    stride,
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,  # the power of two that holds PER_TOKEN; below, the same for pairs, experts and COUNTERS
    PAIRS: tl.constexpr,
    BINS: tl.constexpr,
    ALL_COUNTERS: tl.constexpr,
    COUNTERS: tl.constexpr,
    TURNS: tl.constexpr,
    NARROW: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token, part = tl.program_id(0), tl.program_id(1)
    block = part * (COLUMNS // 128) + tl.arange(0, COLUMNS // 128)
    inside = block < K // 128
    # the launch before the router's has written x
    codes, scale = _rounded(x, token.to(tl.int64) * stride + block * 128, inside)
    by_word = _by_word(codes)
    wait_for_inputs(OVERLAP)
    number = tl.arange(0, PLACES)
    mine, real = token * PER_TOKEN + number, number < PER_TOKEN
    mine = tl.where(real, mine, pairs)
    expert, position, chunk, rank, total, listed = _sorted(experts, mine, pairs, PAIRS, BINS, TOKENS)
    own, slot = token // TOKENS, token % TOKENS
    sizes = tl.minimum(total - rank // TOKENS * TOKENS, TOKENS)
    if part == 0:
        tl.store(place + mine, position, real)
        tl.store(factors + (own_chunks + chunk) * TOKENS + rank % TOKENS, tl.load(routing + mine, real), real)
        first = real & (rank % TOKENS == 0)
        row = expert if rows is None else tl.load(rows + expert, first, other=0)
        tl.store(chunks + chunk, packed_chunk(row, position, sizes), first)
        _clear(counters, own_chunks + chunk, first, COUNTERS, ALL_COUNTERS)
        if SHARED:
            tl.store(factors + own * TOKENS + slot, 1.0)
            if slot == 0:
                _clear(counters, own + number, number == 0, COUNTERS, ALL_COUNTERS)
        if token == 0:
            tl.store(count, listed)
            tl.store(turns + tl.arange(0, TURNS), tl.zeros((TURNS,), tl.int32))
    for one in tl.static_range(PER_TOKEN):
        to = own_chunks + tl.sum(tl.where(number == one, chunk, 0), 0)
        at = tl.sum(tl.where(number == one, rank % TOKENS, 0), 0)
        size = tl.sum(tl.where(number == one, sizes, 0), 0)
        width = tl.where(size > NARROW, TOKENS, NARROW)
        _store(by_word, scale, inputs, scales, to, width, at, part * (COLUMNS // 128), inside, K, TOKENS)
    if SHARED:
        width = tl.where(tl.minimum(tl.num_programs(0) - own * TOKENS, TOKENS) > NARROW, TOKENS, NARROW)
        _store(codes, scale, inputs, scales, own, width, slot, part * (COLUMNS // 128), inside, K, TOKENS)


@launched
def arrange(
    x,  # bf16 [tokens, K]
    order,  # int32 [pairs] the pair at each position
    chunks,  # int64, as chunk_parts reads them
    count,  # int32: how many chunks there are
    routing,  # fp32 [pairs]
    inputs,  # as of `prepare`, without a shared expert; and all below
    scales,
    factors,
    counters,
    turns,
    stride,
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ALL_COUNTERS: tl.constexpr,
    COUNTERS: tl.constexpr,
    TURNS: tl.constexpr,
    NARROW: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    chunk, block = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(OVERLAP)
    if chunk + block == 0:
        tl.store(turns + tl.arange(0, TURNS), tl.zeros((TURNS,), tl.int32))
    if chunk < tl.load(count):
        _, begin, size = chunk_parts(tl.load(chunks + chunk))
        slot = tl.arange(0, TOKENS)
        inside = slot < size
        pair = tl.load(order + begin + slot, inside, other=0)
        if block == 0:
            tl.store(factors + chunk * TOKENS + slot, tl.load(routing + pair, inside, other=0.0))
            _clear(counters, chunk + slot, slot == 0, COUNTERS, ALL_COUNTERS)
        given = (pair // PER_TOKEN).to(tl.int64) * stride + block * 128
        codes, scale = _rounded(x, given, inside)
        byte = tl.arange(0, 128)
        width = tl.where(size > NARROW, TOKENS, NARROW)
        to = chunk.to(tl.int64) * (K * TOKENS) + block * (128 * width)
        at = slot[:, None] * 32 + (byte // 32 * (32 * width) + byte % 32)[None]
        tl.store(inputs + to + at, _by_word(codes), inside[:, None])
        tl.store(scales + chunk * (K // 128 * TOKENS) + block * TOKENS + slot, scale, inside)
